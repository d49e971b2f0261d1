/* Sends the samples of a simulation to a run of paramserver. C99 and libzmq 4.3.
 *
 *     ps_client *client = ps_client_new();
 *     if (ps_client_open(client, NULL) == PS_OK)                          a simulation that the run has started
 *         for (int step = 0; step < ps_client_info(client)->steps; step++) {
 *             solve(temperature);
 *             ps_client_put(client, "temperature", PS_FLOAT64, 2, (int64_t[]){n, n}, temperature);
 *             if (ps_client_send(client, step) != PS_OK)
 *                 break;
 *         }
 *     int status = ps_client_close(client);                               waits until every sample is acknowledged
 *     if (status != PS_OK)
 *         fprintf(stderr, "%s\n", ps_client_error(client));
 *     ps_client_free(client);
 *
 * Use a client from one thread. It starts no thread that calls the program: messages are sent and received inside its
 * calls, which end when the run is silent for timeout_s. The protocol is described in docs/protocol.md.
 */
#ifndef PS_CLIENT_H
#define PS_CLIENT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_client ps_client;

/* What a call returns. After PS_OVER and PS_FAILED the client has ended: every later call returns the same. */
enum {
    PS_OK = 0,
    PS_OVER = 1,    /* the run needs no more samples; end well */
    PS_INVALID = 2, /* a wrong argument or call: nothing was sent, and the client stays as it was */
    PS_FAILED = 3   /* a trainer or the run is gone, or refuses this client */
};

/* The dtypes of arrays, as numpy writes them. */
#define PS_FLOAT32 "<f4"
#define PS_FLOAT64 "<f8"
#define PS_INT32 "<i4"
#define PS_INT64 "<i8"

/* How to open a client. Begin with PS_OPTIONS, which leaves everything to the environment that a run gives to the
 * simulations that it starts; outside of one, address and simulation must be given. */
typedef struct {
    const char *address;      /* tcp://host:port, printed by the run; NULL = of the environment */
    const char *keys;         /* folder with server.key and client.key_secret, or a client's secret key file; required
                                 beyond this machine; NULL = of the environment, or none */
    double timeout_s;         /* silence of the run, or of a trainer that is waited for, after which this fails;
                                 0 = 60 s for the first answer of the run, then simulations.timeout_s of the run */
    int64_t simulation;       /* its number, from 0; -1 = of the environment */
    const double *parameters; /* the numbers that each sample carries; NULL = of the environment, or none */
    int num_parameters;
    int member, members;      /* process and processes of the simulation's group; -1 = of the environment, or 0 of 1 */
    int64_t attempt;          /* how many times it was started before; -1 = of the environment, or 0 */
} ps_options;
#define PS_OPTIONS {NULL, NULL, 0, -1, NULL, 0, -1, -1, -1}

/* What an open client knows. It stays readable until ps_client_free. */
typedef struct {
    int64_t simulation, steps; /* steps: samples that the run expects of each simulation; -1 = as many as are sent */
    const double *parameters;
    int num_parameters, member, members;
    int64_t attempt;
    int64_t sent, refused;     /* samples; refused messages, whose reasons are printed to stderr */
    double waited_s;           /* seconds that ps_client_send has waited for room */
} ps_info;

/* NULL only without memory. */
ps_client *ps_client_new(void);

/* Registers the simulation, and waits until all trainers have joined. A client may be opened before its run starts.
 * options: NULL = all from the environment. */
int ps_client_open(ps_client *client, const ps_options *options);

/* Copies one field of the next sample, in C order (the last index varies fastest). Of a group, shape[0] is this
 * member's part of the first dimension. float32 and float64 are converted to the dtype that the run declares, if no
 * number overflows; other dtypes must be that one. */
int ps_client_put(ps_client *client, const char *field, const char *dtype, int dimensions, const int64_t *shape,
                  const void *array);

/* Sends what was put as one step; every field of the run must have been put. Steps count from 0 and increase. Waits
 * while the window to its trainer is full, that is, while the buffer of that trainer is full of unseen samples. */
int ps_client_send(ps_client *client, int64_t step);

/* Waits until every sample is acknowledged and the run knows that this member is done. Of a client that has ended, it
 * returns how. Calling it again has no effect. */
int ps_client_close(ps_client *client);

/* Frees the client. Without ps_client_close before, the run counts the simulation as failed. NULL has no effect. */
void ps_client_free(ps_client *client);

/* One sentence about the last call that did not return PS_OK. */
const char *ps_client_error(const ps_client *client);

const ps_info *ps_client_info(const ps_client *client);

/* The size of a field's dimension as the run declares it; -1 = there is none. */
int64_t ps_client_size(const ps_client *client, const char *field, int dimension);

#ifdef __cplusplus
}
#endif
#endif
