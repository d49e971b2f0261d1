/* See ps_client.h for the interface, and docs/protocol.md for the messages and the rules that this file follows. */
#define _POSIX_C_SOURCE 200809L
#include "ps_client.h"

#include <errno.h>
#include <float.h>
#include <locale.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

enum { VERSION = 1, HEADER_BYTES = 28, MAX_DIMENSIONS = 16, MAX_ADDRESS = 256, MAX_BODY = 1 << 20, MAX_WARNINGS = 20 };
enum { HELLO = 1, BYE = 2, PING = 3, WELCOME = 17, PONG = 18, REFUSED = 19, OVER = 20 };
enum { OPEN = 33, SAMPLE = 34, HEARTBEAT = 35, HAD = 36, ACK = 49, READY = 66, GET = 81, WEIGHTS = 82 };

static const double HELLO_TIMEOUT_S = 60, PING_INTERVAL_S = 1, HEARTBEAT_INTERVAL_S = 1, RETRY_S = 1;
static const double RECEIVE_INTERVAL_S = 0.1; /* with room in the window, replies are received this often */
static const double LAST_ACKS_S = 2;          /* for the acknowledgements that one process sends while another says OVER */
static const double GONE_S = 5;               /* after this long without a listener the run is gone */
static const double ALIVE_FACTOR = 10;        /* how much longer a run is waited for that answers PING */
static const size_t MAX_STEPS = 65536;        /* in one HAD */

typedef struct {
    char name[256], dtype[4];
    int dimensions;
    int64_t shape[MAX_DIMENSIONS], rows; /* rows: of what was put; -1 = nothing was */
    zmq_msg_t array;
} field;

typedef struct sample {
    struct sample *next;
    int64_t step;
    int num_frames;
    zmq_msg_t frames[]; /* the descriptor, and one for each field */
} sample;

/* One DEALER socket, and the monitor that reports when its connection is made and lost. */
typedef struct {
    void *socket, *monitor;
    char address[MAX_ADDRESS], name[MAX_ADDRESS + 32];
    int connections;
    double seen_at, lost_at; /* lost_at: 0 = connected, or the first attempt lasts */
} connection;

typedef struct {
    connection to;
    char address[MAX_ADDRESS];             /* as the run announced it last */
    int64_t sent, acked, released, unsent; /* samples on this connection; unsent: still to be sent on it */
    sample *first, **end, *next;           /* all that are not released; from next on, those that are unsent */
    int64_t *had;                          /* the steps that were released on any connection */
    size_t num_had, capacity;
    double waiting_since, heartbeat_at;
} trainer;

struct ps_client {
    int state, status; /* status: how it has ended */
    char error[1024], warning[1024];
    ps_info info;
    char address[MAX_ADDRESS], keys[1024];
    double *parameters, timeout_s, receive_at;
    int64_t single_trainer, window, last_step;
    int64_t not_sent; /* steps that the run had before, and that were not sent again */
    int run_started, registered_on, num_sockets, num_warnings, num_opening, num_trainers;
    int num_fields, num_required; /* those after the required ones may be left out of a sample */
    void *context;
    pid_t pid;            /* of the process that made the context */
    connection run;       /* to the coordinator */
    zmq_msg_t opening[2]; /* the body of HELLO and OPEN */
    trainer *trainers;
    field *fields;
    zmq_pollitem_t *items;
    int kind; /* of the message that was received last; 0 = none */
    int64_t simulation, count, attempt;
    zmq_msg_t *values; /* of a subscriber: where the values of WEIGHTS are received */
    size_t body_bytes;
    char body[MAX_BODY];
};
enum { NEW, OPENED, CLOSED };

static int refuse(ps_client *c, int status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(c->error, sizeof c->error, format, arguments);
    va_end(arguments);
    return status;
}

/* Both end the function that they stand in: a call whose status is not PS_OK, and a condition that must not hold. */
#define TRY(call) do { int status_ = (call); if (status_ != PS_OK) return status_; } while (0)
#define FAIL_IF(wrong, ...) do { if (wrong) return refuse(c, PS_FAILED, __VA_ARGS__); } while (0)
#define NO_MEMORY "there is no memory for this client"

static double least(double a, double b) { return a < b ? a : b; }
static double most(double a, double b) { return a > b ? a : b; }

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* JSON, read in place. A value is a pointer to its first byte; NULL = there is none. */

static const char *after_spaces(const char *at) { return at + strspn(at, " \t\r\n"); }

static const char *after_value(const char *at)
{
    int depth = 0;
    do {
        at = after_spaces(at);
        if (*at == '"') {
            for (at++; *at && *at != '"'; at++) at += *at == '\\' && at[1];
            if (!*at++) return NULL;
        } else if (*at == '[' || *at == '{') depth++, at++;
        else if (depth && *at && strchr("]},:", *at)) depth -= *at == ']' || *at == '}', at++;
        else {
            size_t length = strcspn(at, "[]{},:\" \t\r\n");
            if (!length) return NULL;
            at += length;
        }
    } while (depth);
    return at;
}

static const char *first_item(const char *list)
{
    if (!list || (*list != '[' && *list != '{') || !after_value(list)) return NULL;
    list = after_spaces(list + 1);
    return *list == ']' || *list == '}' ? NULL : list;
}

/* Of a key in an object, the value is the next item. */
static const char *next_item(const char *item)
{
    item = item ? after_value(item) : NULL;
    item = item ? after_spaces(item) : NULL;
    return item && (*item == ',' || *item == ':') ? after_spaces(item + 1) : NULL;
}

static const char *member_of(const char *object, const char *name)
{
    const char *key;
    for (key = first_item(object); key; key = next_item(next_item(key)))
        if (*key == '"' && !strncmp(key + 1, name, strlen(name)) && key[1 + strlen(name)] == '"') return next_item(key);
    return NULL;
}

/* Copies a text without its quotes; returns whether it fits and has no escapes, which are not decoded. */
static int read_text(const char *at, char *text, size_t size)
{
    const size_t length = at && *at == '"' ? strcspn(at + 1, "\"\\") : size;
    if (length >= size || at[1 + length] != '"') return 0;
    memcpy(text, at + 1, length);
    text[length] = '\0';
    return 1;
}

/* In the C locale: strtod of a program's own locale may expect a comma. */
static int read_number(const char *at, double *value)
{
    const locale_t plain = newlocale(LC_NUMERIC_MASK, "C", (locale_t)0), before = uselocale(plain);
    char *end = NULL;
    *value = at ? strtod(at, &end) : 0;
    uselocale(before);
    freelocale(plain);
    return at && end != at;
}

static int read_integer(const char *at, int64_t *value)
{
    *value = at && *at >= '0' && *at <= '9' ? strtoll(at, NULL, 10) : -1;
    return *value >= 0;
}

/* Connections. */

static void close_connection(connection *to)
{
    if (to->socket) zmq_socket_monitor(to->socket, NULL, 0);
    if (to->monitor) zmq_close(to->monitor);
    if (to->socket) zmq_close(to->socket);
    to->socket = to->monitor = NULL;
}

static int read_key(ps_client *c, const char *file, const char *label, char key[41])
{
    char text[4096], *found;
    FILE *opened = fopen(file, "r");
    FAIL_IF(!opened, "%s must be a key that can be read (%s); make keys with: paramserver keys FOLDER", file,
            strerror(errno));
    text[fread(text, 1, sizeof text - 1, opened)] = '\0';
    fclose(opened);
    found = strstr(text, label);
    FAIL_IF(!found || !read_text(found + strlen(label), key, 41) || strlen(key) != 40,
            "%s must hold a %s of 40 characters; make keys with: paramserver keys FOLDER", file, label);
    return PS_OK;
}

static int secure(ps_client *c, void *socket)
{
    char secret_file[1100], server_file[1100], public_key[41], secret_key[41], server_key[41];
    struct stat about;
    const int is_folder = !stat(c->keys, &about) && S_ISDIR(about.st_mode);
    const char *slash = strrchr(c->keys, '/');
    const int length = is_folder ? (int)strlen(c->keys) : slash ? (int)(slash - c->keys) : 0;
    snprintf(secret_file, sizeof secret_file, "%s%s", c->keys, is_folder ? "/client.key_secret" : "");
    snprintf(server_file, sizeof server_file, "%.*s/server.key", length ? length : 1, length ? c->keys : ".");
    TRY(read_key(c, secret_file, "public-key = ", public_key));
    TRY(read_key(c, secret_file, "secret-key = ", secret_key));
    TRY(read_key(c, server_file, "public-key = ", server_key));
    FAIL_IF(zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, public_key, 40) ||
                zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, secret_key, 40) ||
                zmq_setsockopt(socket, ZMQ_CURVE_SERVERKEY, server_key, 40),
            "the keys in %s cannot be used (%s)", c->keys, zmq_strerror(errno));
    return PS_OK;
}

static int connect_to(ps_client *c, connection *to, const char *name, const char *address)
{
    static const int keepalive[] = {1, 5, 3, 15000}; /* on; every 5 s; 3 times; 15,000 ms */
    const int none = 0, ipv6 = strchr(address, '[') != NULL;
    const int events = ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_CONNECT_RETRIED | ZMQ_EVENT_DISCONNECTED;
    const int is_local = !strncmp(address, "tcp://127.", 10) || !strncmp(address, "tcp://localhost:", 16) ||
                         !strncmp(address, "tcp://[::1]:", 12);
    char monitored[64];
    FAIL_IF(!*c->keys && !is_local,
            "keys (NULL) must be given with the address %s, which is beyond this machine; name the "
            "folder of the run's keys",
            address);
    memset(to, 0, sizeof *to);
    snprintf(to->address, sizeof to->address, "%s", address);
    snprintf(to->name, sizeof to->name, "%s at %s", name, to->address);
    snprintf(monitored, sizeof monitored, "inproc://monitor-%d", c->num_sockets++);
    to->seen_at = now_s();
    to->socket = zmq_socket(c->context, ZMQ_DEALER);
    to->monitor = zmq_socket(c->context, ZMQ_PAIR);
    FAIL_IF(!to->socket || !to->monitor, "%s: there is no socket for it (%s)", to->name, zmq_strerror(errno));
    /* No high-water mark: the window bounds what waits to leave, so that a send never blocks. None for events either:
     * ZeroMQ's I/O thread would wait while the simulation computes and reads none. */
    zmq_setsockopt(to->socket, ZMQ_SNDHWM, &none, sizeof none);
    zmq_setsockopt(to->monitor, ZMQ_RCVHWM, &none, sizeof none);
    zmq_setsockopt(to->socket, ZMQ_LINGER, &none, sizeof none);
    zmq_setsockopt(to->socket, ZMQ_IPV6, &ipv6, sizeof ipv6);
    if (c->values) { /* it may wait for hours: a host that is gone is noticed, and connected to again */
        zmq_setsockopt(to->socket, ZMQ_TCP_KEEPALIVE, &keepalive[0], sizeof *keepalive);
        zmq_setsockopt(to->socket, ZMQ_TCP_KEEPALIVE_IDLE, &keepalive[1], sizeof *keepalive);
        zmq_setsockopt(to->socket, ZMQ_TCP_KEEPALIVE_INTVL, &keepalive[1], sizeof *keepalive);
        zmq_setsockopt(to->socket, ZMQ_TCP_KEEPALIVE_CNT, &keepalive[2], sizeof *keepalive);
        zmq_setsockopt(to->socket, ZMQ_TCP_MAXRT, &keepalive[3], sizeof *keepalive);
    }
    if (*c->keys) TRY(secure(c, to->socket));
    FAIL_IF(zmq_socket_monitor(to->socket, monitored, events) || zmq_connect(to->monitor, monitored),
            "%s cannot be watched (%s)", to->name, zmq_strerror(errno));
    FAIL_IF(zmq_connect(to->socket, address),
            "address (%s) must be tcp://host:port (%s); take the one that the run prints", address,
            zmq_strerror(errno));
    return PS_OK;
}

/* Reads what the monitor has reported. Returns for how many seconds there has been no connection. */
static double disconnected_s(connection *to)
{
    unsigned char event[6];
    uint16_t number;
    while (zmq_recv(to->monitor, event, sizeof event, ZMQ_DONTWAIT) >= 0) {
        memcpy(&number, event, sizeof number);
        zmq_recv(to->monitor, event, 0, ZMQ_DONTWAIT); /* the address */
        if (number == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) to->connections++, to->lost_at = 0;
        else if (!to->lost_at && (to->connections || number == ZMQ_EVENT_CONNECT_RETRIED)) to->lost_at = now_s();
    }
    return to->lost_at ? most(now_s() - to->lost_at, DBL_MIN) : 0;
}

static int send_frame(ps_client *c, connection *to, zmq_msg_t *frame, int flags)
{
    int sent;
    do sent = zmq_msg_send(frame, to->socket, ZMQ_DONTWAIT | flags);
    while (sent < 0 && errno == EINTR);
    if (sent < 0) zmq_msg_close(frame);
    /* Without a high-water mark a send fails only where ZeroMQ does not connect again: after a failed handshake. */
    FAIL_IF(sent < 0,
            "%s has broken off the connection to this client: it is no run, or it does not know this client's "
            "key; correct the address, or the keys on both sides",
            to->name);
    return PS_OK;
}

/* Sends a message. Its frames are kept and share their memory with what is sent. */
static int send_message(ps_client *c, connection *to, int kind, int64_t step, zmq_msg_t *frames, int num_frames)
{
    const uint64_t values[] = {'p',
                               's',
                               VERSION,
                               (uint64_t)kind,
                               (uint64_t)c->info.simulation,
                               (uint64_t)step,
                               (uint64_t)c->info.member,
                               (uint64_t)c->info.members,
                               (uint64_t)c->info.attempt};
    static const int bytes[] = {1, 1, 1, 1, 8, 8, 2, 2, 4};
    unsigned char *at;
    zmq_msg_t frame;
    int i, b;
    FAIL_IF(zmq_msg_init_size(&frame, HEADER_BYTES), NO_MEMORY);
    at = zmq_msg_data(&frame);
    for (i = 0; i < 9; i++)
        for (b = bytes[i] - 1; b >= 0; b--) *at++ = (unsigned char)(values[i] >> (8 * b));
    TRY(send_frame(c, to, &frame, num_frames ? ZMQ_SNDMORE : 0));
    for (i = 0; i < num_frames; i++) {
        zmq_msg_init(&frame);
        zmq_msg_copy(&frame, &frames[i]);
        TRY(send_frame(c, to, &frame, i + 1 < num_frames ? ZMQ_SNDMORE : 0));
    }
    return PS_OK;
}

static int64_t big_endian(const unsigned char *at, int bytes)
{
    uint64_t value = 0;
    int i;
    for (i = 0; i < bytes; i++) value = value << 8 | at[i];
    return (int64_t)value;
}

/* Receives one message into kind, simulation, count (its step), attempt and body, a text; kind is 0 if there is none.
 * Of a subscriber, the second frame after the header is values. */
static int receive(ps_client *c, connection *from)
{
    unsigned char header[HEADER_BYTES] = {0};
    int size, got, more, frame;
    size_t length = sizeof more;
    c->kind = 0;
    do size = zmq_recv(from->socket, header, sizeof header, ZMQ_DONTWAIT);
    while (size < 0 && errno == EINTR);
    if (size < 0) return PS_OK;
    c->body_bytes = 0;
    for (frame = 1; !zmq_getsockopt(from->socket, ZMQ_RCVMORE, &more, &length) && more; frame++) {
        if (c->values && frame == 2) {
            FAIL_IF(zmq_msg_recv(c->values, from->socket, 0) < 0, NO_MEMORY);
            continue;
        }
        got = zmq_recv(from->socket, c->body + c->body_bytes, MAX_BODY - 1 - c->body_bytes, 0);
        FAIL_IF(got < 0 || (size_t)got >= MAX_BODY - c->body_bytes, "%s sent too long a message for this client",
                from->name);
        c->body_bytes += (size_t)got;
    }
    c->body[c->body_bytes] = '\0';
    from->seen_at = now_s();
    FAIL_IF(size != HEADER_BYTES || memcmp(header, "ps", 2),
            "%s answered what cannot be understood: it does not begin as a message of paramserver does", from->name);
    FAIL_IF(header[2] != VERSION,
            "%s answered what cannot be understood: protocol version (%d) must be %d; use the client "
            "of the same paramserver",
            from->name, header[2], VERSION);
    c->kind = header[3];
    c->simulation = big_endian(header + 4, 8);
    c->count = big_endian(header + 12, 8);
    c->attempt = big_endian(header + 24, 4);
    return c->kind != OVER ? PS_OK : refuse(c, PS_OVER, "%.900s", *c->body ? c->body : "the run wants no more samples");
}

/* Waits until something arrives, but not beyond a time. The coordinator's OVER ends a wait for a trainer too. */
static void wait_until(ps_client *c, double until, int with_trainers)
{
    int i, n = 0;
    for (i = -1; i < (with_trainers ? c->num_trainers : 0); i++) {
        const connection *to = i < 0 ? &c->run : &c->trainers[i].to;
        if (!to->socket) continue;
        c->items[n++] = (zmq_pollitem_t){to->socket, 0, ZMQ_POLLIN, 0};
        c->items[n++] = (zmq_pollitem_t){to->monitor, 0, ZMQ_POLLIN, 0};
    }
    zmq_poll(c->items, n, (long)most(0, 1000 * (until - now_s()) + 1));
}

/* The coordinator, and the directory of trainers that it announces. */

static int read_fields(ps_client *c, const char *row)
{
    for (; row; row = next_item(row), c->num_fields++) {
        const char *name = first_item(row), *dtype = next_item(name), *size = next_item(dtype);
        field *f = realloc(c->fields, (size_t)(c->num_fields + 1) * sizeof *f);
        FAIL_IF(!f, NO_MEMORY);
        c->fields = f;
        f = memset(&f[c->num_fields], 0, sizeof *f);
        f->rows = -1;
        FAIL_IF(!size || *size != '[' || !read_text(dtype, f->dtype, sizeof f->dtype),
                "%s described a field as %.100s, which cannot be understood", c->run.name, row);
        FAIL_IF(!read_text(name, f->name, sizeof f->name),
                "field (%.100s) must have a name in ASCII, of at most 255 letters, "
                "for this client; rename it in simulations.fields",
                name);
        for (size = first_item(size); size; size = next_item(size))
            FAIL_IF(f->dimensions == MAX_DIMENSIONS || !read_integer(size, &f->shape[f->dimensions++]),
                    "field %s must have at most %d dimensions", f->name, MAX_DIMENSIONS);
    }
    return PS_OK;
}

/* Reads a WELCOME: the first for everything, later ones for the addresses of trainers that were replaced. */
static int read_directory(ps_client *c)
{
    const char *text = after_spaces(c->body), *first = first_item(member_of(text, "trainers")), *item;
    double timeout_s;
    int i, count = 0;
    for (item = first; item; item = next_item(item)) count++;
    FAIL_IF(!count || !read_integer(member_of(text, "window"), &c->window) || !member_of(text, "fields") ||
                !read_number(member_of(text, "timeout_s"), &timeout_s),
            "%s answered what cannot be understood: this is no welcome (%.100s)", c->run.name, text);
    FAIL_IF(c->trainers && count != c->num_trainers, "%s has %d trainers and had %d; start this simulation again",
            c->run.name, count, c->num_trainers);
    if (!c->trainers) {
        zmq_pollitem_t *items = realloc(c->items, (size_t)(2 * count + 2) * sizeof *items);
        FAIL_IF(!items, NO_MEMORY);
        c->items = items;
        c->trainers = calloc((size_t)count, sizeof *c->trainers);
        FAIL_IF(!c->trainers, NO_MEMORY);
        c->num_trainers = count;
        c->timeout_s = c->timeout_s > 0 ? c->timeout_s : timeout_s;
        read_integer(member_of(text, "steps"), &c->info.steps); /* null becomes -1 here and below */
        if (member_of(text, "first_step")) read_integer(member_of(text, "first_step"), &c->info.first_step);
        c->not_sent = c->info.first_step;
        TRY(read_fields(c, first_item(member_of(text, "fields"))));
        c->num_required = c->num_fields;
        TRY(read_fields(c, first_item(member_of(text, "optional"))));
    }
    read_integer(member_of(text, "single_trainer"), &c->single_trainer);
    FAIL_IF(c->single_trainer >= count, "%s answered what cannot be understood: trainer %d of %d", c->run.name,
            (int)c->single_trainer, count);
    for (i = 0, item = first; item; i++, item = next_item(item))
        FAIL_IF(!read_text(item, c->trainers[i].address, MAX_ADDRESS), "%s gave %.100s as the address of a trainer",
                c->run.name, item);
    return PS_OK;
}

/* Sends a request to the coordinator and waits for its reply, limit_s at most; 0 = ALIVE_FACTOR times timeout_s. */
static int request(ps_client *c, int kind, int64_t step, int num_frames, int expect, double timeout_s, double limit_s)
{
    const double began = now_s(), gone_s = limit_s > 0 ? limit_s : GONE_S;
    double pinged_at = began, waited_s, away_s;
    int unanswered = 0, connections;
    limit_s = limit_s > 0 ? limit_s : ALIVE_FACTOR * timeout_s;
    disconnected_s(&c->run);
    connections = (int)most(1, c->run.connections);
    c->run.seen_at = began;
    TRY(send_message(c, &c->run, kind, step, c->opening, num_frames));
    for (;;) {
        wait_until(c, least(least(pinged_at + PING_INTERVAL_S, c->run.seen_at + timeout_s), began + limit_s), 0);
        do {
            TRY(receive(c, &c->run));
            if (c->kind == expect) return PS_OK;
            FAIL_IF(c->kind == REFUSED, "%s refused this client: %.600s", c->run.name, c->body);
            unanswered = unanswered && c->kind != PONG;
        } while (c->kind);
        waited_s = now_s() - began;
        away_s = disconnected_s(&c->run);
        FAIL_IF((away_s >= gone_s || (away_s > 0 && waited_s >= limit_s)) && (c->run_started || c->run.connections),
                "%s is gone, no process has listened there for %.0f s; see its log", c->run.name, away_s);
        FAIL_IF(now_s() - c->run.seen_at >= timeout_s,
                "%s gave no sign of life for %g s; see that it runs and that this is its address%s", c->run.name,
                timeout_s,
                *c->keys ? ", and that the public key of this client is in the folder clients of its keys" : "");
        FAIL_IF(waited_s >= limit_s, "%s lives, but its trainers were not ready within %.0f s; see the log of the run",
                c->run.name, waited_s);
        if (now_s() < pinged_at + PING_INTERVAL_S) continue;
        pinged_at = now_s();
        if (c->run.connections > connections) { /* another coordinator may listen, which has not received the request */
            connections = c->run.connections;
            unanswered = 0;
            TRY(send_message(c, &c->run, kind, step, c->opening, num_frames));
        }
        if (!unanswered) TRY(send_message(c, &c->run, PING, 0, NULL, 0)); /* without a listener they would pile up */
        unanswered = 1;
    }
}

static int enroll(ps_client *c, double timeout_s, double limit_s)
{
    TRY(request(c, HELLO, 0, c->num_opening, WELCOME, timeout_s, limit_s));
    c->registered_on = (int)most(1, c->run.connections);
    return read_directory(c);
}

/* Whether a coordinator listens that may not be the one that knows this client. */
static int coordinator_returned(ps_client *c)
{
    disconnected_s(&c->run);
    return c->run.connections > c->registered_on;
}

/* The trainers. Samples are kept until they are released, and sent again where a connection was lost. */

static int64_t in_flight(const trainer *t) { return t->unsent + t->sent - t->acked; }

static int send_unsent(ps_client *c, trainer *t)
{
    for (; t->next && t->sent - t->acked < c->window; t->next = t->next->next, t->unsent--, t->sent++)
        TRY(send_message(c, &t->to, SAMPLE, t->next->step, t->next->frames, t->next->num_frames));
    return PS_OK;
}

static void free_sample(sample *one)
{
    int i;
    for (i = 0; i < one->num_frames; i++) zmq_msg_close(&one->frames[i]);
    free(one);
}

static int release_first(ps_client *c, trainer *t)
{
    sample *first = t->first;
    if (t->num_had == t->capacity) {
        int64_t *had = realloc(t->had, (t->capacity = 2 * t->capacity + 64) * sizeof *had);
        FAIL_IF(!had, NO_MEMORY);
        t->had = had;
    }
    t->had[t->num_had++] = first->step;
    t->released++;
    t->first = first->next;
    if (!t->first) t->end = &t->first;
    free_sample(first);
    return PS_OK;
}

static void warn(ps_client *c, const connection *from, const char *what, const char *text)
{
    char line[sizeof c->warning];
    snprintf(line, sizeof line, "%s %s%.600s", from->name, what, text);
    if (strcmp(line, c->warning) && c->num_warnings++ < MAX_WARNINGS)
        fprintf(stderr, "paramserver: %s\n", strcpy(c->warning, line));
}

static int receive_acks(ps_client *c, trainer *t)
{
    do {
        int64_t released;
        TRY(receive(c, &t->to));
        if (c->kind == REFUSED) c->info.refused++, warn(c, &t->to, "refused a message: ", c->body);
        if (c->kind != ACK || c->simulation != c->info.simulation || c->count > t->sent) continue;
        released = c->count;
        if (c->body_bytes) memcpy(&released, c->body, sizeof released);
        /* Both are totals, so a repeated ACK does no harm. */
        t->acked = c->count > t->acked ? c->count : t->acked;
        while (t->released < released && t->released < c->count) TRY(release_first(c, t));
    } while (c->kind);
    return send_unsent(c, t);
}

static int receive_all(ps_client *c)
{
    int i;
    for (i = 0; i < c->num_trainers; i++)
        if (c->trainers[i].to.socket) {
            disconnected_s(&c->trainers[i].to);
            TRY(receive_acks(c, &c->trainers[i]));
        }
    disconnected_s(&c->run);
    do {
        TRY(receive(c, &c->run));
        if (c->kind == WELCOME) TRY(read_directory(c)); /* a trainer was replaced */
    } while (c->kind);
    return PS_OK;
}

/* Connects to a trainer. What was not released on an earlier connection is sent again: the trainer drops what it has.
 * A trainer that has taken the place of another learns what that one had. */
static int connect_trainer(ps_client *c, trainer *t)
{
    char name[32];
    size_t first, count;
    close_connection(&t->to);
    if (!t->first) t->end = &t->first;
    t->next = t->first;
    t->unsent += t->sent - t->released;
    t->sent = t->acked = t->released = 0;
    snprintf(name, sizeof name, "trainer %d", (int)(t - c->trainers));
    TRY(connect_to(c, &t->to, name, t->address));
    TRY(send_message(c, &t->to, OPEN, 0, c->opening, c->num_opening));
    for (first = 0; first < t->num_had; first += count) {
        zmq_msg_t steps;
        int status;
        count = t->num_had - first < MAX_STEPS ? t->num_had - first : MAX_STEPS;
        FAIL_IF(zmq_msg_init_size(&steps, count * sizeof *t->had), NO_MEMORY);
        memcpy(zmq_msg_data(&steps), t->had + first, count * sizeof *t->had);
        status = send_message(c, &t->to, HAD, 0, &steps, 1);
        zmq_msg_close(&steps);
        TRY(status);
    }
    return send_unsent(c, t);
}

static int is_lost(ps_client *c, trainer *t)
{
    return disconnected_s(&t->to) > 0 || t->to.connections > 1 || strcmp(t->to.address, t->address) ||
           coordinator_returned(c);
}

static int reconnect(ps_client *c, trainer *t)
{
    const double deadline = now_s() + c->timeout_s;
    TRY(receive_all(c)); /* what it has sent before the connection ended: it may be OVER */
    warn(c, &t->to, "", "has no connection to this client any more; it asks the run for its replacement");
    while (now_s() < deadline) {
        double retry_at;
        TRY(enroll(c, c->timeout_s, most(deadline - now_s(), 0.001))); /* the reply waits for the replacement */
        TRY(connect_trainer(c, t));
        retry_at = least(deadline, now_s() + RETRY_S);
        while (now_s() < retry_at && !strcmp(t->to.address, t->address)) {
            if (disconnected_s(&t->to) == 0 && t->to.connections == 1) {
                t->waiting_since = t->heartbeat_at = now_s();
                return PS_OK;
            }
            wait_until(c, retry_at, 1);
            TRY(receive_all(c));
        }
    }
    return refuse(c, PS_FAILED,
                  "the connection to %s was lost, and it was not replaced within %g s; see the log of the run",
                  t->to.name, c->timeout_s);
}

/* Sends a heartbeat if one is due, and fails after the trainer's silence; again_at = when to call this again. */
static int keep_alive(ps_client *c, trainer *t, double *again_at)
{
    const double interval_s = least(HEARTBEAT_INTERVAL_S, c->timeout_s / 4);
    const double fails_at = most(t->to.seen_at, t->waiting_since) + c->timeout_s;
    FAIL_IF(now_s() >= fails_at, "%s gave no sign of life for %g s; that trainer is gone, see the log of the run",
            t->to.name, c->timeout_s);
    if (now_s() >= t->heartbeat_at + interval_s) {
        t->heartbeat_at = now_s();
        TRY(send_message(c, &t->to, HEARTBEAT, 0, NULL, 0));
    }
    *again_at = least(*again_at, least(fails_at, t->heartbeat_at + interval_s));
    return PS_OK;
}

/* Waits until at most so many samples are in flight to one trainer; NULL = to each. */
static int wait_for_acks(ps_client *c, trainer *one, int64_t at_most)
{
    int i, waits = 1;
    for (i = 0; i < c->num_trainers; i++) c->trainers[i].waiting_since = c->trainers[i].heartbeat_at = now_s();
    while (waits) {
        double again_at = now_s() + c->timeout_s;
        /* Every connection, not only that which is waited for: its trainer may store nothing before the others have
         * their samples. */
        for (i = 0; i < c->num_trainers; i++)
            if (c->trainers[i].to.socket && is_lost(c, &c->trainers[i])) TRY(reconnect(c, &c->trainers[i]));
        for (i = 0, waits = 0; i < c->num_trainers; i++) {
            trainer *t = &c->trainers[i];
            if (!t->to.socket || (one && t != one) || in_flight(t) <= at_most) continue;
            waits = 1;
            TRY(keep_alive(c, t, &again_at));
        }
        if (!waits) break;
        wait_until(c, again_at, 1);
        TRY(receive_all(c));
    }
    return PS_OK;
}

static int wait_for_room(ps_client *c, trainer *t)
{
    if (!t->to.socket) TRY(connect_trainer(c, t));
    if (now_s() >= c->receive_at) { /* also with room in the window: ACKs would pile up, and OVER come unnoticed */
        c->receive_at = now_s() + RECEIVE_INTERVAL_S;
        TRY(receive_all(c));
        if (is_lost(c, t)) TRY(reconnect(c, t));
    }
    if (in_flight(t) >= c->window) TRY(receive_acks(c, t));
    if (in_flight(t) >= c->window) {
        const double began = now_s();
        const int status = wait_for_acks(c, t, c->window - 1);
        c->info.waited_s += now_s() - began;
        return status;
    }
    return PS_OK;
}

static int finish(ps_client *c)
{
    do { /* again where another coordinator has taken the place of the one that knew this client */
        int64_t sent;
        int status;
        TRY(wait_for_acks(c, NULL, 0));
        if (coordinator_returned(c)) TRY(enroll(c, c->timeout_s, c->timeout_s)); /* no sample was sent */
        sent = c->info.sent > c->info.refused ? c->info.sent - c->info.refused : 0;
        status = request(c, BYE, sent + c->not_sent, 0, READY, c->timeout_s, c->timeout_s);
        if (status == PS_OVER || (status != PS_OK && !coordinator_returned(c))) return status;
    } while (coordinator_returned(c));
    return PS_OK;
}

/* Arguments and the environment. */

/* A whole number of the environment; -1 = not set. */
static int read_variable(ps_client *c, const char *name, int64_t *value)
{
    const char *text = getenv(name);
    *value = -1;
    FAIL_IF(text && *text && (!read_integer(text, value) || text[strspn(text, "0123456789")] || strlen(text) > 18),
            "%s (%.100s) must be a whole number from 0; the run sets it, leave it alone", name, text);
    return PS_OK;
}

/* The parameters of the caller, or those that the run gave: a JSON list. */
static int read_parameters(ps_client *c, const ps_options *o, const char *given)
{
    const char *first = given && !o->parameters ? first_item(after_spaces(given)) : NULL, *item;
    int i, count = o->parameters ? o->num_parameters : 0;
    for (item = first; item; item = next_item(item)) count++;
    c->parameters = malloc((size_t)(count + 1) * sizeof *c->parameters);
    FAIL_IF(!c->parameters || zmq_msg_init_size(&c->opening[0], (size_t)count * sizeof *c->parameters), NO_MEMORY);
    c->num_opening = 1;
    for (i = 0, item = first; i < count; i++, item = next_item(item)) {
        if (o->parameters) c->parameters[i] = o->parameters[i];
        else
            FAIL_IF(!read_number(item, &c->parameters[i]), "PARAMSERVER_PARAMETERS (%.200s) must be a list of numbers",
                    given);
        FAIL_IF(!isfinite(c->parameters[i]), "parameters (%g) must be finite; correct them", c->parameters[i]);
    }
    memcpy(zmq_msg_data(&c->opening[0]), c->parameters, (size_t)count * sizeof *c->parameters);
    c->info.parameters = c->parameters;
    c->info.num_parameters = count;
    return PS_OK;
}

static int read_options(ps_client *c, const ps_options *o)
{
    const char *given = getenv("PARAMSERVER_ADDRESS"), *secret = getenv("PARAMSERVER_SECRET");
    const char *address = o->address ? o->address : given, *keys = o->keys ? o->keys : getenv("PARAMSERVER_KEYS");
    int64_t simulation, member, members, attempt;
    TRY(read_variable(c, "PARAMSERVER_SIMULATION", &simulation));
    TRY(read_variable(c, "PARAMSERVER_MEMBER", &member));
    TRY(read_variable(c, "PARAMSERVER_MEMBERS", &members));
    TRY(read_variable(c, "PARAMSERVER_ATTEMPT", &attempt));
    /* srun gives all processes of a group the same environment except for this variable. */
    if (member < 0 && members > 1) TRY(read_variable(c, "SLURM_PROCID", &member));
    c->info.simulation = o->simulation >= 0 ? o->simulation : simulation;
    member = o->member >= 0 ? o->member : member >= 0 ? member : 0;
    members = o->members >= 0 ? o->members : members >= 0 ? members : 1;
    c->info.attempt = o->attempt >= 0 ? o->attempt : attempt >= 0 ? attempt : 0;
    FAIL_IF(!address || !*address,
            "address (NULL) must be given where the run has not started this process; take the one "
            "that the run prints");
    FAIL_IF(c->info.simulation < 0,
            "simulation (-1) must be given where the run has not started this process; number your "
            "simulations from 0");
    FAIL_IF(strlen(address) >= sizeof c->address || (keys && strlen(keys) >= sizeof c->keys),
            "address and keys must be shorter than %d and %d letters", MAX_ADDRESS, (int)sizeof c->keys);
    FAIL_IF(members < 1 || members > 65535 || member >= members || c->info.attempt > 4294967295,
            "member (%d) must be below members (%d), which is at most 65535, and attempt below 2^32; count from 0",
            (int)member, (int)members);
    FAIL_IF(!(o->timeout_s >= 0 && o->timeout_s < DBL_MAX),
            "timeout_s (%g) must be finite seconds; 0 is that of the run", o->timeout_s);
    strcpy(c->address, address);
    strcpy(c->keys, keys ? keys : "");
    c->info.member = (int)member;
    c->info.members = (int)members;
    c->timeout_s = o->timeout_s;
    c->run_started = given && !strcmp(address, given);
    TRY(read_parameters(c, o, c->info.simulation == simulation ? getenv("PARAMSERVER_PARAMETERS") : NULL));
    /* The secret is for the run and the simulation that it was given to; no other may learn it. */
    if (secret && *secret && c->run_started && c->info.simulation == simulation) {
        FAIL_IF(zmq_msg_init_size(&c->opening[1], strlen(secret)), NO_MEMORY);
        memcpy(zmq_msg_data(&c->opening[1]), secret, strlen(secret));
        c->num_opening = 2;
    }
    return PS_OK;
}

/* Samples. */

static field *find_field(const ps_client *c, const char *name)
{
    int i;
    for (i = 0; i < c->num_fields; i++)
        if (!strcmp(c->fields[i].name, name)) return &c->fields[i];
    return NULL;
}

static void format_shape(char *text, size_t size, int dimensions, const int64_t *shape, int64_t rows)
{
    size_t used = 0;
    int i;
    for (i = 0; i < dimensions && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%lld", i ? ", " : "[", (long long)(i ? shape[i] : rows));
    if (used < size) snprintf(text + used, size - used, i ? "]" : "[]");
}

static void drop_put(field *f)
{
    if (f->rows >= 0) zmq_msg_close(&f->array);
    f->rows = -1;
}

/* A sample of what was put: the descriptor, a JSON list of [name, dtype, shape], and the arrays. */
static int make_sample(ps_client *c, int64_t step, sample **made)
{
    sample *one = calloc(1, sizeof *one + (size_t)(1 + c->num_fields) * sizeof *one->frames);
    char *text = c->body, shape[24 * MAX_DIMENSIONS]; /* nothing is received meanwhile */
    size_t used = 0;
    int i;
    FAIL_IF(!one, NO_MEMORY);
    for (i = 0; i < c->num_fields && used < MAX_BODY; i++) {
        field *f = &c->fields[i];
        if (f->rows < 0) continue;
        format_shape(shape, sizeof shape, f->dimensions, f->shape, f->rows);
        used += (size_t)snprintf(text + used, MAX_BODY - used, "%s[\"%s\", \"%s\", %s]", used ? ", " : "[", f->name,
                                 f->dtype, shape);
    }
    if (used < MAX_BODY) used += (size_t)snprintf(text + used, MAX_BODY - used, "]");
    if (used >= MAX_BODY || zmq_msg_init_size(&one->frames[0], used)) {
        free(one);
        return refuse(c, PS_FAILED, "%d fields are too many for this client", c->num_fields);
    }
    memcpy(zmq_msg_data(&one->frames[0]), text, used);
    for (i = 0, one->num_frames = 1; i < c->num_fields; i++) {
        if (c->fields[i].rows < 0) continue;
        zmq_msg_init(&one->frames[one->num_frames]);
        zmq_msg_move(&one->frames[one->num_frames++], &c->fields[i].array);
    }
    one->step = step;
    *made = one;
    return PS_OK;
}

/* The interface. */

/* ZeroMQ's threads are not in a fork: a call would wait for them for ever, and a sample not leave. */
static int is_fork(const ps_client *c) { return c->context && c->pid != getpid(); }

static int refuse_fork(ps_client *c)
{
    return refuse(c, PS_INVALID, "a client must be used by the process that opened it (%ld), and this is a fork of it (%ld); "
                  "open another one here", (long)c->pid, (long)getpid());
}

static int end(ps_client *c, int status)
{
    int i;
    const int closes = !is_fork(c); /* in a fork all of this is its parent's */
    for (i = 0; closes && i < c->num_trainers; i++) close_connection(&c->trainers[i].to);
    if (closes) close_connection(&c->run);
    while (closes && c->context && zmq_ctx_term(c->context) && errno == EINTR) continue;
    c->context = NULL;
    c->state = CLOSED;
    return c->status = status;
}

static int check_open(ps_client *c)
{
    if (!c) return PS_INVALID;
    if (is_fork(c)) return refuse_fork(c);
    if (c->state == OPENED || c->status != PS_OK) return c->status;
    return refuse(c, PS_INVALID, "this client must be open; %s",
                  c->state == NEW ? "call ps_client_open first" : "it is closed, make another one");
}

ps_client *ps_client_new(void)
{
    ps_client *c = calloc(1, sizeof *c);
    if (c) c->info.steps = c->single_trainer = c->last_step = -1;
    return c;
}

static int open_client(ps_client *c, const ps_options *options)
{
    const uint16_t one = 1;
    FAIL_IF(!*(const char *)&one,
            "this client needs a little-endian machine, as it sends arrays as they are in memory");
    TRY(read_options(c, options));
    c->context = zmq_ctx_new();
    c->pid = getpid();
    c->items = malloc(2 * sizeof *c->items);
    FAIL_IF(!c->context || !c->items, NO_MEMORY);
    TRY(connect_to(c, &c->run, "the run", c->address));
    return enroll(c, c->timeout_s > 0 ? c->timeout_s : HELLO_TIMEOUT_S, 0);
}

int ps_client_open(ps_client *c, const ps_options *options)
{
    static const ps_options none = PS_OPTIONS;
    int status;
    if (!c) return PS_INVALID;
    if (c->state != NEW) return refuse(c, PS_INVALID, "this client was opened before; make another one");
    status = open_client(c, options ? options : &none);
    c->state = OPENED;
    return status == PS_OK ? PS_OK : end(c, status);
}

int ps_client_put(ps_client *c, const char *name, const char *dtype, int dimensions, const int64_t *shape,
                  const void *array)
{
    char declared[256], given[256];
    field *f;
    size_t count = 1, i;
    int k, fits, narrows, widens;
    TRY(check_open(c));
    if (!(f = find_field(c, name)))
        return refuse(c, PS_INVALID, "field (%.100s) must be one that the run declares", name);
    for (k = 0, fits = dimensions == f->dimensions; fits && k < dimensions; count *= (size_t)shape[k++])
        fits = shape[k] == f->shape[k] || (!k && c->info.members > 1 && shape[0] > 0 && shape[0] < f->shape[0]);
    if (!fits) {
        format_shape(declared, sizeof declared, f->dimensions, f->shape, f->shape[0]);
        format_shape(given, sizeof given, dimensions, shape, dimensions > 0 ? shape[0] : 0);
        return refuse(c, PS_INVALID, "field %s must have the shape %s%s, this one has %s; reshape it", name, declared,
                      c->info.members > 1 ? ", or be a part of it along the first dimension" : "", given);
    }
    narrows = !strcmp(dtype, PS_FLOAT64) && !strcmp(f->dtype, PS_FLOAT32);
    widens = !strcmp(dtype, PS_FLOAT32) && !strcmp(f->dtype, PS_FLOAT64);
    if (!narrows && !widens && strcmp(dtype, f->dtype))
        return refuse(c, PS_INVALID, "field %s must be %s, %.10s is not converted to it; convert it", name, f->dtype,
                      dtype);
    for (i = 0; narrows && i < count; i++)
        if (isfinite(((const double *)array)[i]) && fabs(((const double *)array)[i]) > FLT_MAX)
            return refuse(c, PS_INVALID, "field %s (%g) must fit into float32; scale it, or declare float64", name,
                          ((const double *)array)[i]);
    drop_put(f);
    if (zmq_msg_init_size(&f->array, count * (size_t)(f->dtype[2] - '0')))
        return end(c, refuse(c, PS_FAILED, NO_MEMORY));
    f->rows = dimensions ? shape[0] : 0;
    for (i = 0; narrows && i < count; i++) ((float *)zmq_msg_data(&f->array))[i] = (float)((const double *)array)[i];
    for (i = 0; widens && i < count; i++) ((double *)zmq_msg_data(&f->array))[i] = ((const float *)array)[i];
    if (!narrows && !widens) memcpy(zmq_msg_data(&f->array), array, zmq_msg_size(&f->array));
    return PS_OK;
}

int ps_client_put_version(ps_client *c, ps_version version)
{
    const int64_t size = 2, numbers[] = {version.generation, version.step};
    TRY(check_open(c));
    if (!find_field(c, "version"))
        return refuse(c, PS_INVALID, "version (%lld, %lld) must be left out, as this run takes none: it has no section "
                      "publish", (long long)version.generation, (long long)version.step);
    return ps_client_put(c, "version", PS_INT64, 1, &size, numbers);
}

int ps_client_send(ps_client *c, int64_t step)
{
    sample *one = NULL;
    trainer *t;
    int i, status;
    TRY(check_open(c));
    if (step <= c->last_step || (c->info.steps >= 0 && step >= c->info.steps))
        return refuse(c, PS_INVALID, "step (%lld) must be above the last one (%lld)%s; number the samples from 0",
                      (long long)step, (long long)c->last_step,
                      step > c->last_step ? ", and below the steps of a simulation" : "");
    for (i = 0; i < c->num_required; i++)
        if (c->fields[i].rows < 0)
            return refuse(c, PS_INVALID, "field (%s) must be in every sample, it is missing; put it too",
                          c->fields[i].name);
    t = &c->trainers[c->single_trainer >= 0
                         ? (uint64_t)c->single_trainer
                         : ((uint64_t)c->info.simulation + (uint64_t)step) % (uint64_t)c->num_trainers];
    status = make_sample(c, step, &one);
    for (i = 0; i < c->num_fields; i++) drop_put(&c->fields[i]);
    if (status == PS_OK && (status = wait_for_room(c, t)) != PS_OK) free_sample(one);
    if (status != PS_OK) return end(c, status);
    *t->end = one;
    t->end = &one->next;
    t->next = t->next ? t->next : one;
    t->unsent++;
    c->last_step = step;
    c->info.sent++;
    c->not_sent -= step < c->info.first_step;
    status = send_unsent(c, t);
    return status == PS_OK ? PS_OK : end(c, status);
}

/* Whether all samples are acknowledged once the run is over. Each trainer sends OVER after its last ACK, but that of one
 * process may overtake the ACK of another. */
static int last_acks(ps_client *c)
{
    const double until = now_s() + LAST_ACKS_S;
    int i, all = 1;
    for (i = 0; i < c->num_trainers; i++) {
        trainer *t = &c->trainers[i];
        int status = PS_OK, is_last = 0;
        while (status == PS_OK && in_flight(t) && !is_last) {
            zmq_pollitem_t item = {t->to.socket, 0, ZMQ_POLLIN, 0};
            /* What arrived before the connection has ended is read too: the program may have computed meanwhile. */
            is_last = disconnected_s(&t->to) > 0 || now_s() >= until;
            if (!is_last) zmq_poll(&item, 1, (long)most(0, 1000 * (until - now_s()) + 1));
            status = receive_acks(c, t);
        }
        all = all && !in_flight(t);
    }
    return all;
}

int ps_client_close(ps_client *c)
{
    int status;
    if (!c || is_fork(c)) return check_open(c);
    if (c->state != OPENED) return c->status;
    status = finish(c);
    return end(c, status == PS_OVER && last_acks(c) ? PS_OK : status);
}

void ps_client_free(ps_client *c)
{
    int i;
    if (!c) return;
    end(c, c->status);
    for (i = 0; i < c->num_trainers; i++) {
        trainer *t = &c->trainers[i];
        while (t->first) {
            sample *first = t->first;
            t->first = first->next;
            free_sample(first);
        }
        free(t->had);
    }
    for (i = 0; i < c->num_fields; i++) drop_put(&c->fields[i]);
    for (i = 0; i < c->num_opening; i++) zmq_msg_close(&c->opening[i]);
    free(c->trainers);
    free(c->fields);
    free(c->items);
    free(c->parameters);
    free(c);
}

const char *ps_client_error(const ps_client *c)
{
    return c ? c->error : "this client must be open; call ps_client_open first";
}

const ps_info *ps_client_info(const ps_client *c)
{
    static const ps_info none = {.steps = -1};
    return c ? &c->info : &none;
}

int64_t ps_client_size(const ps_client *c, const char *name, int dimension)
{
    const field *f = c ? find_field(c, name) : NULL;
    return f && dimension >= 0 && dimension < f->dimensions ? f->shape[dimension] : -1;
}

/* Subscribers. */

#define BFLOAT16 "bfloat16"

/* One version, as it is received. Names are parts of the text, which is its description. */
typedef struct {
    ps_version version;
    char *text, *run; /* run: its name, in JSON */
    ps_tensor *tensors;
    ps_version *starts; /* the first step of each generation */
    unsigned char *values;
    int num_tensors, num_starts;
} weights;

struct ps_subscriber {
    ps_client c; /* its run is the connection to the publisher; simulation and attempt are those of the last request */
    zmq_msg_t values;
    weights newest;
    const char *encoding;
    int is_asked, asked_on; /* whether a request has no reply yet, and the number of connections when it was sent */
    int is_other;           /* whether another run than before has sent the newest, since the last call */
};

static const double LONGEST_WAIT_S = 600; /* of one request; a longer one is made again */
static const int64_t LARGEST_NUMBER = 4294967295;

static int is_newer(ps_version a, ps_version b)
{
    return a.generation != b.generation ? a.generation > b.generation : a.step > b.step;
}

static size_t aligned(size_t offset) { return (offset + 63) / 64 * 64; }

static void free_weights(weights *w)
{
    free(w->text);
    free(w->tensors);
    free(w->starts);
    free(w->values);
    memset(w, 0, sizeof *w);
}

static int is_bfloat16(const ps_tensor *t) { return !strcmp(t->dtype, BFLOAT16); }

static int num_items(const char *list)
{
    const char *item;
    int count = 0;
    for (item = first_item(list); item; item = next_item(item)) count++;
    return count;
}

/* Ends a text in place; returns it without its quotes. */
static char *unquote(const char *text)
{
    *(char *)(after_value(text) - 1) = '\0';
    return (char *)text + 1;
}

/* The name begins at its quote. */
static int read_tensor(ps_client *c, const char *row, ps_tensor *t)
{
    static const char *const dtypes[] = {"|b1", "|u1", "|i1", "<u2", "<u4", "<u8",  "<i2", "<i4",
                                         "<i8", "<f2", "<f4", "<f8", "<c8", "<c16", BFLOAT16};
    const char *dtype, *size;
    char text[16];
    int64_t length;
    size_t i;
    t->name = first_item(row);
    dtype = next_item(t->name);
    size = next_item(dtype);
    FAIL_IF(!size || *t->name != '"' || *size != '[' || !read_text(dtype, text, sizeof text),
            "%s described a tensor as %.100s, which cannot be understood", c->run.name, row);
    for (i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (!strcmp(text, dtypes[i])) t->dtype = dtypes[i];
    FAIL_IF(!t->dtype, "%s described a tensor as %.100s, whose dtype this subscriber does not know", c->run.name, row);
    t->item_bytes = is_bfloat16(t) ? 2 : strtoul(t->dtype + 2, NULL, 10);
    for (t->size = 1, size = first_item(size); size; size = next_item(size)) {
        FAIL_IF(t->dimensions == MAX_DIMENSIONS || !read_integer(size, &length) ||
                    (length && t->size > (size_t)INT64_MAX / 64 / (size_t)length),
                "%s described a tensor as %.100s; it must have at most %d dimensions, and a size that fits",
                c->run.name, row, MAX_DIMENSIONS);
        t->shape[t->dimensions++] = length;
        t->size *= (size_t)length;
    }
    return PS_OK;
}

/* Reads the description in body, and copies the values. Those of bfloat16 become float32. */
static int read_weights(ps_subscriber *s, weights *w)
{
    ps_client *c = &s->c;
    const char *rows = member_of(after_spaces(c->body), "tensors"), *item;
    const char *starts = member_of(after_spaces(c->body), "starts"), *run = member_of(after_spaces(c->body), "run");
    const unsigned char *data = zmq_msg_data(&s->values);
    const size_t num_bytes = zmq_msg_size(&s->values);
    size_t end = 0, room = 0, k;
    void *values;
    int i;
    FAIL_IF(!rows || *rows != '[' || !starts || *starts != '[' || !run || *run != '"',
            "%s answered what cannot be understood: this is no version of a model (%.100s)", c->run.name, c->body);
    w->version = (ps_version){c->simulation, c->count};
    w->num_tensors = num_items(rows);
    w->num_starts = num_items(starts);
    w->text = malloc(c->body_bytes + 1);
    w->tensors = calloc((size_t)w->num_tensors + 1, sizeof *w->tensors);
    w->starts = calloc((size_t)w->num_starts + 1, sizeof *w->starts);
    FAIL_IF(!w->text || !w->tensors || !w->starts, NO_MEMORY);
    memcpy(w->text, c->body, c->body_bytes + 1);
    w->run = w->text + (run - c->body);
    for (i = 0, item = first_item(starts); item; i++, item = next_item(item)) {
        const char *generation = first_item(item);
        FAIL_IF(!read_integer(generation, &w->starts[i].generation) ||
                    !read_integer(next_item(generation), &w->starts[i].step),
                "%s answered what cannot be understood: %.100s is the start of no generation", c->run.name, item);
    }
    for (i = 0, item = first_item(w->text + (rows - c->body)); item; i++, item = next_item(item)) {
        ps_tensor *t = &w->tensors[i];
        TRY(read_tensor(c, item, t));
        t->values = data + (end = aligned(end));
        end += t->size * t->item_bytes;
        room = aligned(room) + t->size * (is_bfloat16(t) ? 4 : t->item_bytes);
        if (end > num_bytes) break;
    }
    FAIL_IF(end != num_bytes, "%s answered what cannot be understood: %lu bytes are not the values of its tensors",
            c->run.name, (unsigned long)num_bytes);
    FAIL_IF(posix_memalign(&values, 64, room + 1), NO_MEMORY);
    w->values = values;
    for (i = 0, room = 0; i < w->num_tensors; i++) {
        ps_tensor *t = &w->tensors[i];
        const unsigned char *from = t->values;
        unsigned char *to = w->values + (room = aligned(room));
        t->name = unquote(t->name);
        if (is_bfloat16(t)) {
            for (k = 0; k < t->size; k++) {
                const uint32_t bits = (uint32_t)from[2 * k] << 16 | (uint32_t)from[2 * k + 1] << 24;
                memcpy(to + 4 * k, &bits, 4);
            }
            t->dtype = PS_FLOAT32;
            t->item_bytes = 4;
        } else memcpy(to, from, t->size * t->item_bytes);
        t->values = to;
        room += t->size * t->item_bytes;
    }
    *(char *)after_value(w->run) = '\0';
    return PS_OK;
}

static int is_current(const weights *newest, ps_version version)
{
    int i;
    for (i = 0; i < newest->num_starts; i++)
        if (newest->starts[i].generation > version.generation && newest->starts[i].step < version.step) return 0;
    return 1;
}

/* Takes over a version, unless the newest is as new. */
static int take(ps_subscriber *s)
{
    weights *newest = &s->newest, got = {0};
    const int status = read_weights(s, &got);
    const int same_run = status == PS_OK && newest->run && !strcmp(newest->run, got.run);
    char step[24];
    zmq_msg_close(&s->values);
    zmq_msg_init(&s->values);
    if (status != PS_OK || (same_run && !is_newer(got.version, newest->version))) {
        free_weights(&got); /* a reply that comes late */
        return status;
    }
    snprintf(step, sizeof step, "%lld", (long long)newest->version.step);
    if (newest->run && !same_run) {
        s->is_other = 1;
        warn(&s->c, &s->c.run, "publishes versions of another run now: ", got.run);
    } else if (newest->run && !is_current(&got, newest->version))
        warn(&s->c, &s->c.run, "has returned to a checkpoint, and has taken back versions up to step ", step);
    free_weights(newest);
    *newest = got;
    return PS_OK;
}

/* Asks for a version that is newer than one; waits: also for those that are not made yet. */
static int send_get(ps_subscriber *s, ps_version have, int waits, double timeout_s)
{
    ps_client *c = &s->c;
    const char *run = s->newest.run ? s->newest.run : "\"\"";
    const long long ms = (long long)(1000 * least(most(0, timeout_s), LONGEST_WAIT_S) + 0.999);
    zmq_msg_t body;
    int status;
    /* Not %f: a program's own locale may write a comma. */
    const int length = snprintf(c->body, MAX_BODY,
                                "{\"run\": %s, \"encoding\": \"%s\", \"timeout_s\": %lld.%03lld, \"waits\": %s, "
                                "\"holds\": false}",
                                run, s->encoding, ms / 1000, ms % 1000, waits ? "true" : "false");
    FAIL_IF(length >= MAX_BODY || zmq_msg_init_size(&body, (size_t)length), NO_MEMORY);
    memcpy(zmq_msg_data(&body), c->body, (size_t)length);
    c->info.simulation = have.generation;
    c->info.attempt = c->info.attempt % LARGEST_NUMBER + 1;
    status = send_message(c, &c->run, GET, have.step, &body, 1);
    zmq_msg_close(&body);
    s->is_asked = 1;
    s->asked_on = c->run.connections;
    return status;
}

/* Receives until there is the reply to a request of this call, or no time is left; waits: or until there is a version
 * newer than one. A subscriber has one request at a time: replies to many would pile up on a slow connection. */
static int fetch(ps_subscriber *s, ps_version asked, int waits, double timeout_s)
{
    ps_client *c = &s->c;
    const double deadline = now_s() + timeout_s;
    int is_own = 0, is_done = 0;
    s->is_other = 0;
    for (;;) {
        do {
            TRY(receive(c, &c->run));
            FAIL_IF(c->kind == REFUSED, "%s refused this subscriber: %.600s", c->run.name, c->body);
            if (c->kind == WEIGHTS) TRY(take(s));
            if (c->kind && s->is_asked && c->attempt == c->info.attempt) {
                s->is_asked = 0;
                is_done = is_own && !waits;
            }
            if (waits) is_done = s->newest.run && (s->is_other || is_newer(s->newest.version, asked));
        } while (c->kind && !is_done);
        /* Another publisher, after a lost connection, has not received the request. */
        if (disconnected_s(&c->run) > 0 || c->run.connections > s->asked_on) s->is_asked = 0;
        /* With a timeout of 0 the next call returns what is asked for now. */
        if ((!is_done || timeout_s == 0) && !s->is_asked && c->run.connections && !c->run.lost_at) {
            const int holds = s->newest.run && !is_newer(asked, s->newest.version);
            TRY(send_get(s, holds ? s->newest.version : asked, waits, deadline - now_s()));
            is_own = 1;
        }
        if (is_done || now_s() >= deadline) return PS_OK;
        wait_until(c, least(deadline, now_s() + LONGEST_WAIT_S), 0);
    }
}

/* As fetch, of a subscriber that is open; ends it as its client ends. */
static int fetch_open(ps_subscriber *s, ps_version asked, int waits, double timeout_s)
{
    ps_client *c = &s->c;
    int status;
    if (is_fork(c)) return refuse_fork(c);
    if (c->status != PS_OK) return c->status;
    if (c->state != OPENED) return refuse(c, PS_INVALID, "this subscriber must be open; call ps_subscriber_open first");
    if (!(timeout_s >= 0 && timeout_s < 1e9))
        return refuse(c, PS_INVALID, "timeout_s (%g) must be a number of seconds from 0 to 1e9; correct it", timeout_s);
    if (asked.generation < 0 || asked.step < 0)
        return refuse(c, PS_INVALID, "version (%lld, %lld) must have a generation and a step from 0; correct it",
                      (long long)asked.generation, (long long)asked.step);
    status = fetch(s, asked, waits, timeout_s);
    return status == PS_OK ? PS_OK : end(c, status);
}

ps_subscriber *ps_subscriber_new(void)
{
    ps_subscriber *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    zmq_msg_init(&s->values);
    s->c.values = &s->values;
    s->c.info.members = 1;
    return s;
}

static int open_subscriber(ps_subscriber *s, const char *address, const char *keys, const char *encoding)
{
    ps_client *c = &s->c;
    const uint16_t one = 1;
    FAIL_IF(!*(const char *)&one, "this subscriber needs a little-endian machine, as it takes values as they are sent");
    FAIL_IF(!address || strlen(address) >= sizeof c->address || (keys && strlen(keys) >= sizeof c->keys),
            "address and keys must be shorter than %d and %d letters, and address not NULL", MAX_ADDRESS,
            (int)sizeof c->keys);
    s->encoding = !encoding || !strcmp(encoding, "exact") ? "exact" : !strcmp(encoding, BFLOAT16) ? BFLOAT16 : NULL;
    FAIL_IF(!s->encoding, "encoding (%.100s) must be exact or bfloat16; correct it", encoding);
    strcpy(c->keys, keys ? keys : "");
    c->context = zmq_ctx_new();
    c->pid = getpid();
    c->items = malloc(2 * sizeof *c->items);
    FAIL_IF(!c->context || !c->items, NO_MEMORY);
    return connect_to(c, &c->run, "the publisher of the run", address);
}

int ps_subscriber_open(ps_subscriber *s, const char *address, const char *keys, const char *encoding)
{
    int status;
    if (s->c.state != NEW) return refuse(&s->c, PS_INVALID, "this subscriber was opened before; make another one");
    status = open_subscriber(s, address, keys, encoding);
    s->c.state = OPENED;
    return status == PS_OK ? PS_OK : end(&s->c, status);
}

int ps_subscriber_latest(ps_subscriber *s, double timeout_s)
{
    TRY(fetch_open(s, s->newest.version, !s->newest.run, timeout_s));
    if (s->newest.run) return PS_OK;
    return refuse(&s->c, PS_NONE,
                  "%s has sent no version of the model within %g s; see that the run trains, has the section publish, "
                  "and prints this address%s",
                  s->c.run.name, timeout_s,
                  *s->c.keys ? ", and that the public key of this client is in the folder clients of its keys" : "");
}

int ps_subscriber_newer_than(ps_subscriber *s, ps_version version, double timeout_s)
{
    TRY(fetch_open(s, version, !s->newest.run || !is_newer(s->newest.version, version), timeout_s));
    if (s->newest.run && (s->is_other || is_newer(s->newest.version, version))) return PS_OK;
    return refuse(&s->c, PS_NONE, "%s has sent no version that is newer than step %lld of generation %lld within %g s",
                  s->c.run.name, (long long)version.step, (long long)version.generation, timeout_s);
}

ps_version ps_subscriber_version(const ps_subscriber *s) { return s->newest.version; }

const ps_tensor *ps_subscriber_tensors(const ps_subscriber *s, int *count)
{
    *count = s->newest.num_tensors;
    return s->newest.tensors;
}

const ps_tensor *ps_subscriber_tensor(const ps_subscriber *s, const char *name)
{
    int i;
    for (i = 0; i < s->newest.num_tensors; i++)
        if (!strcmp(s->newest.tensors[i].name, name)) return &s->newest.tensors[i];
    return NULL;
}

int ps_subscriber_is_current(const ps_subscriber *s, ps_version version) { return is_current(&s->newest, version); }

const char *ps_subscriber_error(const ps_subscriber *s) { return s->c.error; }

void ps_subscriber_free(ps_subscriber *s)
{
    if (!s) return;
    end(&s->c, s->c.status);
    zmq_msg_close(&s->values);
    free_weights(&s->newest);
    free(s->c.items);
    free(s);
}
