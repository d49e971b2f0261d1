/* Prints the norm of a tensor of each version of a model that this receives while a run trains it:
 *
 *     watch tcp://127.0.0.1:5556 layers.0.weight [KEYS]         address, name of the tensor, keys beyond this machine
 *
 * The run has the section publish, and prints its address. This ends with the run.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ps_client.h"

static double norm(const ps_tensor *tensor)
{
    const int is_double = !strcmp(tensor->dtype, PS_FLOAT64);
    double sum = 0;
    size_t i;
    for (i = 0; i < tensor->size; i++) {
        const double value = is_double ? ((const double *)tensor->values)[i] : ((const float *)tensor->values)[i];
        sum += value * value;
    }
    return sqrt(sum);
}

static int print_norm(const ps_subscriber *model, const char *name)
{
    const ps_version version = ps_subscriber_version(model);
    const ps_tensor *tensor = ps_subscriber_tensor(model, name);
    if (!tensor || (strcmp(tensor->dtype, PS_FLOAT32) && strcmp(tensor->dtype, PS_FLOAT64))) {
        const ps_tensor *tensors;
        int count, i;
        tensors = ps_subscriber_tensors(model, &count);
        fprintf(stderr, "watch: %s must be one of float32 or float64 of\n", name);
        for (i = 0; i < count; i++) fprintf(stderr, "  %s (%s)\n", tensors[i].name, tensors[i].dtype);
        return PS_INVALID;
    }
    printf("generation %lld, step %lld: %.6g\n", (long long)version.generation, (long long)version.step, norm(tensor));
    fflush(stdout);
    return PS_OK;
}

int main(int argc, char **argv)
{
    ps_subscriber *model = ps_subscriber_new();
    int status;
    if (!model || argc < 3 || argc > 4) {
        fprintf(stderr, "usage: %s ADDRESS TENSOR [KEYS]\n", argv[0]);
        ps_subscriber_free(model);
        return PS_INVALID;
    }
    status = ps_subscriber_open(model, argv[1], argc > 3 ? argv[3] : NULL, NULL);
    if (status == PS_OK) status = ps_subscriber_latest(model, 60);
    while (status == PS_OK && print_norm(model, argv[2]) == PS_OK) /* PS_NONE: the run is gone, or waits for data */
        status = ps_subscriber_newer_than(model, ps_subscriber_version(model), 60);
    if (status != PS_OK) fprintf(stderr, "watch: %s\n", ps_subscriber_error(model));
    ps_subscriber_free(model);
    return status == PS_OVER ? 0 : status == PS_OK ? PS_INVALID : status; /* the run has ended */
}
