/* The heat equation of examples/heat/solver.py in C: each field is sent to a run of paramserver when it is computed.
 *
 * As simulations.command of a run it needs no arguments. Started by hand:
 *
 *     heat tcp://127.0.0.1:5555 3 300 100 200 300 400         address, simulation, initial, left, right, bottom, top
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "ps_client.h"

static const double DT = 0.002, PI = 3.14159265358979323846;
enum { DEFAULT_STEPS = 100, PARAMETERS = 5 };

/* out = sines in sines, which is its own inverse; sines is symmetric. */
static void transform(int n, const double *sines, const double *in, double *half, double *out)
{
    int i, j, k;
    for (i = 0; i < n * n; i++) half[i] = out[i] = 0;
    for (i = 0; i < n; i++)
        for (k = 0; k < n; k++)
            for (j = 0; j < n; j++) half[i * n + j] += sines[i * n + k] * in[k * n + j];
    for (i = 0; i < n; i++)
        for (k = 0; k < n; k++)
            for (j = 0; j < n; j++) out[i * n + j] += half[i * n + k] * sines[k * n + j];
}

/* Backward Euler on n x n inner points of the unit square, in the basis of the stencil's eigenvectors. */
static int simulate(ps_client *client)
{
    const ps_info *run = ps_client_info(client);
    const int64_t size = ps_client_size(client, "temperature", 0), shape[] = {size, size};
    const int n = (int)size, steps = run->steps < 0 ? DEFAULT_STEPS : (int)run->steps;
    const double h = 1.0 / (n + 1), *given = run->parameters;
    double *sines = malloc(6 * sizeof(double) * (size_t)(n * n)), *inflow = sines + n * n, *modes = inflow + n * n;
    double *field = modes + n * n, *half = field + n * n, *divisor = half + n * n;
    int i, j, step, status = PS_OK;
    if (!sines || run->num_parameters != PARAMETERS) {
        fprintf(stderr, "heat: there must be memory, and %d parameters: initial, left, right, bottom, top\n",
                PARAMETERS);
        free(sines);
        return PS_INVALID;
    }
    for (i = 0; i < n; i++)
        for (j = 0; j < n; j++) {
            const double x = 2 * sin(0.5 * PI * h * (i + 1)) / h, y = 2 * sin(0.5 * PI * h * (j + 1)) / h;
            sines[i * n + j] = sqrt(2 * h) * sin(PI * h * (i + 1) * (j + 1));
            divisor[i * n + j] = 1 + DT * (x * x + y * y);
            /* A point next to a side has that side as a neighbour. */
            field[i * n + j] =
                DT / (h * h) *
                ((i == 0) * given[1] + (i == n - 1) * given[2] + (j == 0) * given[3] + (j == n - 1) * given[4]);
        }
    transform(n, sines, field, half, inflow);
    for (i = 0; i < n * n; i++) field[i] = given[0];
    transform(n, sines, field, half, modes);
    for (step = 0; step < steps && status == PS_OK; step++) {
        for (i = 0; i < n * n; i++) modes[i] = (modes[i] + inflow[i]) / divisor[i];
        transform(n, sines, modes, half, field);
        status = ps_client_put(client, "temperature", PS_FLOAT64, 2, shape, field);
        if (status == PS_OK) status = ps_client_send(client, step);
    }
    free(sines);
    return status;
}

int main(int argc, char **argv)
{
    ps_options options = PS_OPTIONS;
    double parameters[PARAMETERS];
    ps_client *client = ps_client_new();
    int i, status;
    if (argc != 1 && argc != 3 + PARAMETERS) {
        fprintf(stderr, "usage: %s [ADDRESS SIMULATION INITIAL LEFT RIGHT BOTTOM TOP]\n", argv[0]);
        return 2;
    }
    if (argc > 1) {
        options.address = argv[1];
        options.simulation = atoll(argv[2]);
        for (i = 0; i < PARAMETERS; i++) parameters[i] = atof(argv[3 + i]);
        options.parameters = parameters;
        options.num_parameters = PARAMETERS;
    }
    status = client ? ps_client_open(client, &options) : PS_FAILED;
    if (status == PS_OK) status = simulate(client);
    if (status == PS_OK) status = ps_client_close(client); /* all that was sent has arrived */
    if (status != PS_OK) fprintf(stderr, "heat: %s\n", client ? ps_client_error(client) : "there is no memory");
    ps_client_free(client);
    return status == PS_OVER ? 0 : status; /* a run that needs no more samples is no failure */
}
