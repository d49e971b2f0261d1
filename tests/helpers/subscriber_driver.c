/* Makes the calls of a subscriber of examples/clients/c that it reads from standard input, one a line, and prints what
 * each returned: status, generation, step, number of tensors, and the error. With PS_OK the tensors follow: a line with
 * the length of its name, dtype and shape, then the name and the values. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ps_client.h"

static char line[1 << 16];

static char *word(void) { return strtok(NULL, " \n"); }

static ps_version version(void)
{
    ps_version one;
    one.generation = strtoll(word(), NULL, 10);
    one.step = strtoll(word(), NULL, 10);
    return one;
}

static void print_tensors(const ps_subscriber *model)
{
    int count, i, k;
    const ps_tensor *tensors = ps_subscriber_tensors(model, &count);
    for (i = 0; i < count; i++) {
        const ps_tensor *tensor = ps_subscriber_tensor(model, tensors[i].name);
        if (tensor != &tensors[i] || (uintptr_t)tensor->values % 64) exit(4);
        printf("%d %s", (int)strlen(tensor->name), tensor->dtype);
        for (k = 0; k < tensor->dimensions; k++) printf(" %lld", (long long)tensor->shape[k]);
        printf("\n%s", tensor->name);
        fwrite(tensor->values, tensor->item_bytes, tensor->size, stdout);
    }
}

int main(void)
{
    ps_subscriber *model = ps_subscriber_new();
    while (fgets(line, sizeof line, stdin)) {
        const char *call = strtok(line, " \n");
        ps_version last;
        int status = -1, count;
        if (!strcmp(call, "free")) break;
        if (!strcmp(call, "is_current")) {
            printf("%d \n", ps_subscriber_is_current(model, version()));
            fflush(stdout);
            continue;
        }
        if (!strcmp(call, "open")) {
            const char *address = word(), *keys = word(), *encoding = word();
            status = ps_subscriber_open(model, address, strcmp(keys, "-") ? keys : NULL, encoding);
        }
        if (!strcmp(call, "latest")) status = ps_subscriber_latest(model, atof(word()));
        if (!strcmp(call, "newer_than")) {
            const ps_version asked = version();
            status = ps_subscriber_newer_than(model, asked, atof(word()));
        }
        last = ps_subscriber_version(model);
        ps_subscriber_tensors(model, &count);
        printf("%d %lld %lld %d %s\n", status, (long long)last.generation, (long long)last.step, count,
               status == PS_OK ? "" : ps_subscriber_error(model));
        if (status == PS_OK) print_tensors(model);
        fflush(stdout);
    }
    ps_subscriber_free(model);
    return 0;
}
