! The heat equation of examples/heat/solver.py in Fortran, as simulations.command of a run of paramserver.
!
! temperature(j, i) is the field [i, j] of the other languages.
program heat
   use, intrinsic :: iso_fortran_env, only: real64, error_unit
   use paramserver
   implicit none
   integer, parameter :: default_steps = 100
   real(real64), parameter :: dt = 0.002_real64, pi = acos(-1.0_real64)
   type(ps_client) :: client
   integer :: status

   status = client%open()
   if (status == ps_ok) call simulate()
   if (status == ps_ok) status = client%close()  ! all that was sent has arrived
   if (status /= ps_ok) write (error_unit, "(2a)") "heat: ", client%error()
   call client%free()
   if (status /= ps_ok .and. status /= ps_over) stop 1

contains

   ! Backward Euler on n x n inner points of the unit square, in the basis of the stencil's eigenvectors.
   subroutine simulate()
      real(real64), allocatable :: sines(:, :), modes(:, :), inflow(:, :), divisor(:, :), temperature(:, :)
      real(real64), allocatable :: eigenvalues(:)
      real(real64) :: h, given(5)
      integer :: n, i, step, steps
      if (size(client%parameters()) /= 5) error stop "heat: parameters must be initial, left, right, bottom, top"
      n = client%size("temperature", 1, dimensions=2)
      steps = merge(client%steps(), default_steps, client%steps() >= 0)
      given = client%parameters()
      h = 1.0_real64/(n + 1)
      allocate (sines(n, n), divisor(n, n), inflow(n, n), temperature(n, n), modes(n, n), eigenvalues(n))
      eigenvalues = (2*sin([(0.5_real64*pi*h*i, i=1, n)])/h)**2
      do i = 1, n
         sines(:, i) = sqrt(2*h)*sin([(pi*h*i*step, step=1, n)])
         divisor(:, i) = 1 + dt*(eigenvalues + eigenvalues(i))
      end do
      inflow = 0  ! a point next to a side has that side as a neighbour
      inflow(:, 1) = inflow(:, 1) + given(2)
      inflow(:, n) = inflow(:, n) + given(3)
      inflow(1, :) = inflow(1, :) + given(4)
      inflow(n, :) = inflow(n, :) + given(5)
      inflow = matmul(matmul(sines, dt/h**2*inflow), sines)
      temperature = given(1)
      modes = matmul(matmul(sines, temperature), sines)
      do step = 0, steps - 1
         modes = (modes + inflow)/divisor
         temperature = matmul(matmul(sines, modes), sines)
         status = client%put("temperature", temperature)
         if (status == ps_ok) status = client%send(step)
         if (status /= ps_ok) return
      end do
   end subroutine
end program
