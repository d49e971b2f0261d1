! The client of examples/clients/c/ps_client.h in Fortran 2018. Its functions return the constants ps_*, as in C.
!
!     type(ps_client) :: client
!     if (client%open() == ps_ok) then                       ! a simulation that the run has started
!        do step = 0, client%steps() - 1
!           call solve(temperature)
!           status = client%put("temperature", temperature)  ! real32, real64, int32 or int64, of any rank
!           if (status == ps_ok) status = client%send(step)
!           if (status /= ps_ok) exit
!        end do
!     end if
!     if (client%close() /= ps_ok) print *, client%error()
!     call client%free()
!
! The first index of an array varies fastest: u(nx, ny) is a field of the shape [ny, nx], and the process of a group
! sends its part of the last dimension.
module paramserver
   use, intrinsic :: iso_c_binding
   implicit none
   private
   public :: ps_client, ps_ok, ps_over, ps_invalid, ps_failed

   enum, bind(c)
      enumerator :: ps_ok = 0, ps_over, ps_invalid, ps_failed
   end enum

   type, bind(c) :: c_options
      type(c_ptr) :: address = c_null_ptr, keys = c_null_ptr
      real(c_double) :: timeout_s = 0
      integer(c_int64_t) :: simulation = -1
      type(c_ptr) :: parameters = c_null_ptr
      integer(c_int) :: num_parameters = 0, member = -1, members = -1
      integer(c_int64_t) :: attempt = -1
   end type

   type, bind(c) :: c_info
      integer(c_int64_t) :: simulation, steps
      type(c_ptr) :: parameters
      integer(c_int) :: num_parameters, member, members
      integer(c_int64_t) :: attempt, sent, refused
      real(c_double) :: waited_s
      integer(c_int64_t) :: first_step
   end type

   type :: ps_client
      type(c_ptr), private :: handle = c_null_ptr
   contains
      procedure :: open => open_client
      procedure, private :: put_real32, put_real64, put_int32, put_int64
      generic :: put => put_real32, put_real64, put_int32, put_int64
      procedure :: send, close => close_client, free, error, parameters, size => size_of, steps, first_step, &
         simulation, refused
   end type

   interface
      function c_new() bind(c, name="ps_client_new")
         import; type(c_ptr) :: c_new
      end function
      integer(c_int) function c_open(client, options) bind(c, name="ps_client_open")
         import; type(c_ptr), value :: client; type(c_options), intent(in) :: options
      end function
      integer(c_int) function c_put(client, field, dtype, dimensions, shape, array) bind(c, name="ps_client_put")
         import; type(c_ptr), value :: client, array; character(kind=c_char), intent(in) :: field(*), dtype(*)
         integer(c_int), value :: dimensions; integer(c_int64_t), intent(in) :: shape(*)
      end function
      integer(c_int) function c_send(client, step) bind(c, name="ps_client_send")
         import; type(c_ptr), value :: client; integer(c_int64_t), value :: step
      end function
      integer(c_int) function c_close(client) bind(c, name="ps_client_close")
         import; type(c_ptr), value :: client
      end function
      subroutine c_free(client) bind(c, name="ps_client_free")
         import; type(c_ptr), value :: client
      end subroutine
      function c_error(client) bind(c, name="ps_client_error")
         import; type(c_ptr), value :: client; type(c_ptr) :: c_error
      end function
      function c_get_info(client) bind(c, name="ps_client_info")
         import; type(c_ptr), value :: client; type(c_ptr) :: c_get_info
      end function
      integer(c_int64_t) function c_size(client, field, dimension) bind(c, name="ps_client_size")
         import; type(c_ptr), value :: client; character(kind=c_char), intent(in) :: field(*)
         integer(c_int), value :: dimension
      end function
      integer(c_size_t) function c_strlen(text) bind(c, name="strlen")
         import; type(c_ptr), value :: text
      end function
   end interface

contains

   !> Registers the simulation at the run. What is absent comes from the environment that the run gives.
   integer function open_client(self, address, simulation, parameters, keys, timeout_s, member, members, attempt)
      class(ps_client), intent(inout) :: self
      character(*), intent(in), optional :: address, keys
      integer, intent(in), optional :: simulation, member, members, attempt
      real(c_double), intent(in), optional, target, contiguous :: parameters(:)
      real(c_double), intent(in), optional :: timeout_s
      character(:, c_char), allocatable, target :: address_text, keys_text
      type(c_options) :: options
      if (.not. c_associated(self%handle)) self%handle = c_new()
      if (present(address)) then
         address_text = trim(address)//c_null_char
         options%address = c_loc(address_text)
      end if
      if (present(keys)) then
         keys_text = trim(keys)//c_null_char
         options%keys = c_loc(keys_text)
      end if
      if (present(parameters)) then
         options%parameters = c_loc(parameters)
         options%num_parameters = size(parameters)
      end if
      if (present(timeout_s)) options%timeout_s = timeout_s
      if (present(simulation)) options%simulation = simulation
      if (present(member)) options%member = member
      if (present(members)) options%members = members
      if (present(attempt)) options%attempt = attempt
      open_client = c_open(self%handle, options)
   end function

   !> Copies one field of the next sample.
   integer function put_real32(self, field, array) result(status)
      class(ps_client), intent(in) :: self
      character(*), intent(in) :: field
      real(c_float), intent(in), target, contiguous :: array(..)
      status = put_any(self, field, "<f4", shape(array), c_loc(array))
   end function

   integer function put_real64(self, field, array) result(status)
      class(ps_client), intent(in) :: self
      character(*), intent(in) :: field
      real(c_double), intent(in), target, contiguous :: array(..)
      status = put_any(self, field, "<f8", shape(array), c_loc(array))
   end function

   integer function put_int32(self, field, array) result(status)
      class(ps_client), intent(in) :: self
      character(*), intent(in) :: field
      integer(c_int32_t), intent(in), target, contiguous :: array(..)
      status = put_any(self, field, "<i4", shape(array), c_loc(array))
   end function

   integer function put_int64(self, field, array) result(status)
      class(ps_client), intent(in) :: self
      character(*), intent(in) :: field
      integer(c_int64_t), intent(in), target, contiguous :: array(..)
      status = put_any(self, field, "<i8", shape(array), c_loc(array))
   end function

   integer function put_any(self, field, dtype, sizes, array)
      class(ps_client), intent(in) :: self
      character(*), intent(in) :: field, dtype
      integer, intent(in) :: sizes(:)
      type(c_ptr), intent(in) :: array
      put_any = c_put(self%handle, trim(field)//c_null_char, dtype//c_null_char, size(sizes), &
                      int(sizes(size(sizes):1:-1), c_int64_t), array)
   end function

   !> Sends what was put as one step, from 0 in increasing order.
   integer function send(self, step)
      class(ps_client), intent(in) :: self
      integer, intent(in) :: step
      send = c_send(self%handle, int(step, c_int64_t))
   end function

   !> Waits until every sample is acknowledged and the run knows that this member is done.
   integer function close_client(self)
      class(ps_client), intent(in) :: self
      close_client = c_close(self%handle)
   end function

   subroutine free(self)
      class(ps_client), intent(inout) :: self
      call c_free(self%handle)
      self%handle = c_null_ptr
   end subroutine

   !> One sentence about the last call that did not return ps_ok.
   function error(self) result(text)
      class(ps_client), intent(in) :: self
      character(:), allocatable :: text
      character(kind=c_char), pointer :: letters(:)
      integer :: i
      call c_f_pointer(c_error(self%handle), letters, [c_strlen(c_error(self%handle))])
      allocate (character(size(letters)) :: text)
      do i = 1, size(letters)
         text(i:i) = letters(i)
      end do
   end function

   function info(self)
      class(ps_client), intent(in) :: self
      type(c_info), pointer :: info
      call c_f_pointer(c_get_info(self%handle), info)
   end function

   !> Samples that the run expects of each simulation; -1 = as many as are sent.
   integer function steps(self)
      class(ps_client), intent(in) :: self
      type(c_info), pointer :: found
      found => info(self)
      steps = int(found%steps)
   end function

   !> The first step that the run lacks: above 0 in another attempt of a simulation that ended early.
   integer function first_step(self)
      class(ps_client), intent(in) :: self
      type(c_info), pointer :: found
      found => info(self)
      first_step = int(found%first_step)
   end function

   integer function simulation(self)
      class(ps_client), intent(in) :: self
      type(c_info), pointer :: found
      found => info(self)
      simulation = int(found%simulation)
   end function

   !> Messages that the run refused.
   integer function refused(self)
      class(ps_client), intent(in) :: self
      type(c_info), pointer :: found
      found => info(self)
      refused = int(found%refused)
   end function

   function parameters(self)
      class(ps_client), intent(in) :: self
      real(c_double), allocatable :: parameters(:)
      type(c_info), pointer :: found
      real(c_double), pointer :: numbers(:)
      found => info(self)
      call c_f_pointer(found%parameters, numbers, [found%num_parameters])
      parameters = numbers
   end function

   !> The size of a field's dimension, from 1 as Fortran counts them, of so many; -1 = there is none.
   integer function size_of(self, field, dimension, dimensions)
      class(ps_client), intent(in) :: self
      character(*), intent(in) :: field
      integer, intent(in) :: dimension, dimensions
      size_of = int(c_size(self%handle, trim(field)//c_null_char, dimensions - dimension))
   end function
end module
