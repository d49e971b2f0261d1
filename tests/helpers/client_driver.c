/* Makes the calls of examples/clients/c that it reads from standard input, one a line, and prints what each returned:
 * status, sent, refused, waited_s, simulation, steps, number of parameters, the parameters, and the error. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ps_client.h"

static char line[1 << 16];

static char *word(void) { return strtok(NULL, " \n"); }
static double number(void) { return atof(word()); }

static int open_client(ps_client *client)
{
    ps_options options = PS_OPTIONS;
    double parameters[64];
    char *address = word(), *keys = word();
    int i;
    if (strcmp(address, "-")) options.address = address;
    if (strcmp(keys, "-")) options.keys = keys;
    options.timeout_s = number();
    options.simulation = strtoll(word(), NULL, 10);
    options.member = atoi(word());
    options.members = atoi(word());
    options.attempt = strtoll(word(), NULL, 10);
    options.num_parameters = atoi(word());
    for (i = 0; i < options.num_parameters; i++) parameters[i] = number();
    if (options.num_parameters >= 0) options.parameters = parameters;
    return ps_client_open(client, &options);
}

static int put(ps_client *client)
{
    const char *field = word(), *dtype = word();
    const size_t bytes = (size_t)atol(word());
    const int dimensions = atoi(word());
    int64_t shape[64];
    void *array = malloc(bytes + 1);
    int i, status;
    for (i = 0; i < dimensions; i++) shape[i] = strtoll(word(), NULL, 10);
    if (fread(array, 1, bytes, stdin) != bytes) exit(3);
    status = ps_client_put(client, field, dtype, dimensions, shape, array);
    free(array);
    return status;
}

/* The calls of a fork: PS_OK if they end, each with PS_INVALID and the same sentence. */
static int use_in_fork(ps_client *client)
{
    int status, wrong;
    const pid_t child = fork();
    if (!child) {
        alarm(20);
        wrong = ps_client_send(client, 99) != PS_INVALID || !strstr(ps_client_error(client), "this is a fork of it");
        wrong |= ps_client_close(client) != PS_INVALID;
        ps_client_free(client);
        _exit(wrong);
    }
    waitpid(child, &status, 0);
    return WIFEXITED(status) && !WEXITSTATUS(status) ? PS_OK : PS_FAILED;
}

/* PS_OK if each call on no client returns PS_INVALID, or what is known of none. */
static int use_none(void)
{
    const int64_t shape = 1;
    const double array = 0;
    const ps_version version = {1, 0};
    const int refused = ps_client_open(NULL, NULL) == PS_INVALID && ps_client_send(NULL, 0) == PS_INVALID &&
                        ps_client_put(NULL, "u", PS_FLOAT64, 1, &shape, &array) == PS_INVALID &&
                        ps_client_put_version(NULL, version) == PS_INVALID && ps_client_close(NULL) == PS_INVALID;
    ps_client_free(NULL);
    return refused && strstr(ps_client_error(NULL), "must be open") && ps_client_info(NULL)->steps == -1 &&
                   ps_client_size(NULL, "u", 0) == -1
               ? PS_OK
               : PS_FAILED;
}

int main(void)
{
    ps_client *client = ps_client_new();
    while (fgets(line, sizeof line, stdin)) {
        const char *call = strtok(line, " \n");
        const ps_info *info = ps_client_info(client);
        int status = -1, i;
        if (!strcmp(call, "free")) break;
        if (!strcmp(call, "open")) status = open_client(client);
        if (!strcmp(call, "put")) status = put(client);
        if (!strcmp(call, "none")) status = use_none();
        if (!strcmp(call, "fork")) status = use_in_fork(client);
        if (!strcmp(call, "version")) {
            ps_version version = {strtoll(word(), NULL, 10), 0};
            version.step = strtoll(word(), NULL, 10);
            status = ps_client_put_version(client, version);
        }
        if (!strcmp(call, "send")) status = ps_client_send(client, strtoll(word(), NULL, 10));
        if (!strcmp(call, "close")) status = ps_client_close(client);
        printf("%d %" PRId64 " %" PRId64 " %.17g %" PRId64 " %" PRId64 " %d", status, info->sent, info->refused,
               info->waited_s, info->simulation, info->steps, info->num_parameters);
        for (i = 0; i < info->num_parameters; i++) printf(" %.17g", info->parameters[i]);
        printf(" %s\n", status == PS_OK ? "" : ps_client_error(client));
        fflush(stdout);
    }
    ps_client_free(client);
    return 0;
}
