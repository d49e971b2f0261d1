/* Sends the samples of a simulation to a run of paramserver; below, receives the model while a run trains it. C99 and
 * libzmq 4.3.
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
 * Use a client from one thread, of the process that opened it and not of a fork. It starts no thread that calls the program: messages are sent and received inside its
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

/* A version of the model that the run trains. Versions are compared in this order. A run that returns to a checkpoint
 * begins a new generation: a version of that is newer than all before, also if its step is smaller. */
typedef struct {
    int64_t generation, step;
} ps_version;

/* What a call returns. After PS_OVER and PS_FAILED the client has ended: every later call returns the same. */
enum {
    PS_OK = 0,
    PS_OVER = 1,    /* the run needs no more samples, or has ended; end well */
    PS_INVALID = 2, /* a wrong argument or call: nothing was sent, and the client stays as it was */
    PS_FAILED = 3,  /* a trainer or the run is gone, or refuses this client */
    PS_NONE = 4     /* of a subscriber: there is no such version within the time; call again */
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
    int64_t first_step;        /* that the run lacks: above 0 in another attempt of a simulation that ended early */
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

/* Puts the version of the weights with which the next sample was made: ps_subscriber_version of a subscriber. For a run
 * with the section publish, which needs it with buffer.max_staleness. */
int ps_client_put_version(ps_client *client, ps_version version);

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

/* Receives versions of the model that a run with the section publish trains.
 *
 *     ps_subscriber *model = ps_subscriber_new();
 *     int status = ps_subscriber_open(model, "tcp://127.0.0.1:5556", NULL, NULL);     the address that the run prints
 *     if (status == PS_OK) status = ps_subscriber_latest(model, 5);
 *     while (status == PS_OK || status == PS_NONE) {
 *         act(ps_subscriber_tensor(model, "policy.weight"));
 *         status = ps_subscriber_newer_than(model, ps_subscriber_version(model), 0);
 *     }
 *     if (status != PS_OVER) fprintf(stderr, "%s\n", ps_subscriber_error(model));
 *     ps_subscriber_free(model);
 *
 * What is received is one version, whole, and never older than the one before, also if rank 0 is lost and returns: the
 * subscriber waits for it, and connects again by itself. Use a subscriber from one thread. */
typedef struct ps_subscriber ps_subscriber;

/* A parameter or a module buffer. */
typedef struct {
    const char *name;      /* that of the state_dict; letters beyond ASCII are escaped as in JSON */
    const char *dtype;     /* as numpy writes it: PS_FLOAT32, "|b1", "<c8" and so on */
    int dimensions;
    int64_t shape[16];
    size_t size, item_bytes; /* size: number of values */
    const void *values;    /* in C order, aligned to 64 bytes */
} ps_tensor;

/* NULL only without memory. */
ps_subscriber *ps_subscriber_new(void);

/* Begins to connect; a subscriber may be opened before the run starts. keys: as of ps_options, NULL = none. encoding:
 * NULL or "exact" = values as they are; "bfloat16" = floating-point values are sent rounded, half as many bytes for
 * float32. What is sent as bfloat16 is received as float32. */
int ps_subscriber_open(ps_subscriber *subscriber, const char *address, const char *keys, const char *encoding);

/* Receives the newest version that is published, or that can be: a copy is made if a subscriber asks. PS_OK: there is a
 * version; it is the last one where none is newer within timeout_s. PS_NONE: none was received yet. */
int ps_subscriber_latest(ps_subscriber *subscriber, double timeout_s);

/* Receives the newest version if it is newer than another one; PS_NONE if there is none within timeout_s. With 0 it is
 * what has arrived since the last call, which asked for it. */
int ps_subscriber_newer_than(ps_subscriber *subscriber, ps_version version, double timeout_s);

/* The version that was received last; 0, 0 = none. It stays readable, with its tensors, until the next call of
 * ps_subscriber_latest, ps_subscriber_newer_than or ps_subscriber_free. */
ps_version ps_subscriber_version(const ps_subscriber *subscriber);

/* A tensor of it by its name; NULL = there is none. */
const ps_tensor *ps_subscriber_tensor(const ps_subscriber *subscriber, const char *name);

/* All of its tensors, and their number. */
const ps_tensor *ps_subscriber_tensors(const ps_subscriber *subscriber, int *count);

/* Whether another version was not taken back by a return to a checkpoint, as far as the last one tells. */
int ps_subscriber_is_current(const ps_subscriber *subscriber, ps_version version);

/* One sentence about the last call that did not return PS_OK. */
const char *ps_subscriber_error(const ps_subscriber *subscriber);

/* NULL has no effect. */
void ps_subscriber_free(ps_subscriber *subscriber);

#ifdef __cplusplus
}
#endif
#endif
