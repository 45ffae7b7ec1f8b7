/* Receives frames, launches what is known to lead to a launch, and answers when it is over; without Python's lock.
 *
 * What is not known, or may not be launched now, goes to Python's code as it came, and so does the rest of an answer
 * that a client does not read.
 */

#pragma once

#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#include "answers.h"
#include "connections.h"
#include "driver.h"

#define RECEIVED_BYTES (64 * 1024)
/* Launches that have not ended; what comes beyond them waits in Python's queue, where others can overtake it. */
#define MOST_FLIGHTS 32
/* Connections that are looked at in one turn. */
#define MOST_READY 32
/* Samples are collected before there are more. */
#define MOST_SAMPLES 256

typedef enum {
    /* Bytes that have come; without any, the client has gone. */
    RECEIVED,
    /* The rest of an answer. */
    UNSENT,
    /* A launch has failed, by the driver's code: it has no answer yet. */
    FAILED,
    /* The client had gone before its answer was sent. */
    LEFT,
} Kind;

typedef struct {
    Kind kind;
    int descriptor;
    uint32_t tag;
    int code;
    char *data;
    size_t length;
    /* Used by the event; NULL where it is of no request. */
    Request *request;
} Event;

/* A launch that has not ended. */
typedef struct {
    Connection *connection;
    Request *request;
    uint32_t tag;
    double received, launched;
    void *began, *ended;
    /* Of the driver, where the launch could not be completed. */
    int code;
} Flight;

typedef struct {
    PyObject_HEAD
    Driver driver;
    Connections connections;
    int epoll;
    /* A ring: all launches are on one stream, and end in turn. */
    Flight flights[MOST_FLIGHTS];
    size_t first_flight, flight_count;
    int64_t admitted_bytes;
    void *spare_events[2 * MOST_FLIGHTS];
    size_t spare_count;
    Event *events;
    size_t event_count, event_capacity;
    Request *sampled;
    size_t sample_count;
    uint64_t names;
    double last_sent;
    /* Whether the last request came soon after an answer. */
    bool is_prompt;
    bool is_serving;
    char *answer;
    size_t answer_capacity;
    char received[RECEIVED_BYTES];
} Replayer;

/* What a turn may do. */
typedef struct {
    int64_t requests, bytes;
    bool may_launch;
    double poll_s;
    int others;
} Turn;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* False without memory: then the connection, if it is one's, must be closed, which is what an event without data says
 * of it; the table of events always has room for one of each connection that is looked at. */
static bool add_event(Replayer *self, Event event, const char *data, size_t length)
{
    if (self->event_count == self->event_capacity) {
        size_t capacity = self->event_capacity ? 2 * self->event_capacity : 4 * MOST_READY;
        Event *events = realloc(self->events, capacity * sizeof *events);
        if (events == NULL)
            return false;
        self->events = events;
        self->event_capacity = capacity;
    }
    if (length) {
        event.data = malloc(length);
        if (event.data == NULL)
            return false;
        memcpy(event.data, data, length);
        event.length = length;
    }
    self->events[self->event_count++] = event;
    return true;
}

static void *take_event(Replayer *self)
{
    void *event = NULL;
    if (self->spare_count)
        return self->spare_events[--self->spare_count];
    return self->driver.event_create(&event, 0) == CUDA_SUCCESS ? event : NULL;
}

static void give_event_back(Replayer *self, void *event)
{
    if (event != NULL && self->spare_count < 2 * MOST_FLIGHTS)
        self->spare_events[self->spare_count++] = event;
}

/* Launch what a request leads to; false where nothing was launched. */
static bool launch(Replayer *self, Connection *connection, Request *request, uint32_t tag, double received)
{
    const Driver *driver = &self->driver;
    void *began = take_event(self), *ended = take_event(self);
    double launched = now();
    if (began == NULL || ended == NULL || driver->event_record(began, request->stream) != CUDA_SUCCESS
        || driver->graph_launch(request->graph, request->stream) != CUDA_SUCCESS) {
        give_event_back(self, began);
        give_event_back(self, ended);
        return false;
    }
    /* From here on the device may be writing: whatever happens, this is in flight. */
    int code = driver->event_record(ended, request->stream);
    size_t place = (self->first_flight + self->flight_count++) % MOST_FLIGHTS;
    self->flights[place] = (Flight){connection, request, tag, received, launched, began, ended, code};
    self->admitted_bytes += request->admitted_bytes;
    request->users++;
    connection->users++;
    connection->flights++;
    return true;
}

/* Launch what of these bytes are known requests, one frame after another; returns how many bytes that were. */
static size_t launch_known(Replayer *self, Connection *connection, size_t length, double received, Turn *turn)
{
    size_t position = 0;
    if (!turn->may_launch || connection->is_within_frame)
        return 0;
    while (length - position >= PREFIX_BYTES) {
        const unsigned char *prefix = (const unsigned char *)self->received + position;
        size_t content = read_u32(prefix);
        if (content > length - position - PREFIX_BYTES || self->flight_count == MOST_FLIGHTS)
            break;
        Request *request = find_request(connection, self->received + position + PREFIX_BYTES, content);
        if (request == NULL || turn->requests < 1 || turn->bytes < request->admitted_bytes
            || !launch(self, connection, request, read_u32(prefix + 4), received))
            break;
        turn->requests--;
        turn->bytes -= request->admitted_bytes;
        position += PREFIX_BYTES + content;
    }
    return position;
}

static void receive(Replayer *self, Connection *connection, Turn *turn)
{
    Event event = {.kind = RECEIVED, .descriptor = connection->descriptor};
    ssize_t length = recv(connection->descriptor, self->received, RECEIVED_BYTES, MSG_DONTWAIT);
    if (length < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return;
    if (length <= 0) {
        add_event(self, event, NULL, 0);
        return;
    }
    double received = now();
    size_t launched = launch_known(self, connection, (size_t)length, received, turn);
    if (launched)
        self->is_prompt = received - self->last_sent <= turn->poll_s;
    if (launched < (size_t)length
        && !add_event(self, event, self->received + launched, (size_t)length - launched)) {
        /* Bytes are lost: the connection cannot go on. */
        shutdown(connection->descriptor, SHUT_RDWR);
    }
}

/* Send an answer; false where the client has gone. */
static bool send_answer(Replayer *self, Connection *connection, size_t length)
{
    Event event = {.kind = UNSENT, .descriptor = connection->descriptor};
    ssize_t sent = 0;
    if (!connection->is_behind) {
        sent = send(connection->descriptor, self->answer, length, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
            sent = 0;
    }
    if (sent < 0)
        return false;
    if ((size_t)sent < length) {
        connection->is_behind = true;
        return add_event(self, event, self->answer + sent, length - (size_t)sent);
    }
    return true;
}

static bool reserve_answer(Replayer *self, size_t length)
{
    if (length <= self->answer_capacity)
        return true;
    char *answer = realloc(self->answer, length);
    if (answer == NULL)
        return false;
    self->answer = answer;
    self->answer_capacity = length;
    return true;
}

/* Answer a flight that has ended; false where the client has gone. */
static bool answer(Replayer *self, const Flight *flight, double kernel_s)
{
    Request *request = flight->request;
    double answering = now();
    if (!flight->connection->is_open || !reserve_answer(self, PREFIX_BYTES + request->results_length + LONGEST_REST))
        return false;
    uint64_t name[2] = {next_name(&self->names), next_name(&self->names)};
    double queue_s = flight->launched - flight->received;
    size_t length = write_answer(self->answer, request, flight->tag, name, queue_s, kernel_s);
    if (!send_answer(self, flight->connection, length))
        return false;
    self->last_sent = now();
    Sample sample = {flight->received, flight->launched, kernel_s, answering, self->last_sent};
    if (add_sample(request, sample)) {
        self->sample_count++;
        if (request->sample_count == 1) {
            request->users++;
            request->next_sampled = self->sampled;
            self->sampled = request;
        }
    }
    return true;
}

/* Answer the oldest flight if it has ended; false where it has not. */
static bool land_first(Replayer *self)
{
    Flight flight = self->flights[self->first_flight];
    float kernel_ms = 0;
    int code = flight.code ? flight.code : self->driver.event_query(flight.ended);
    if (code == CUDA_ERROR_NOT_READY)
        return false;
    if (code == CUDA_SUCCESS)
        code = self->driver.event_elapsed(&kernel_ms, flight.began, flight.ended);
    Connection *connection = flight.connection;
    Event event = {.kind = LEFT, .descriptor = connection->descriptor, .tag = flight.tag, .request = flight.request};
    if (code != CUDA_SUCCESS) {
        event.kind = connection->is_open ? FAILED : LEFT;
        event.code = code;
    }
    self->first_flight = (self->first_flight + 1) % MOST_FLIGHTS;
    self->flight_count--;
    self->admitted_bytes -= flight.request->admitted_bytes;
    connection->flights--;
    /* An event, or the list of those with samples, uses the request on; without memory for either it stays. */
    if (code == CUDA_SUCCESS && answer(self, &flight, 1e-3 * (double)kernel_ms)) {
        if (flight.request->sample_count)
            flight.request->users--;
    } else {
        add_event(self, event, NULL, 0);
    }
    release_connection(connection);
    give_event_back(self, flight.began);
    give_event_back(self, flight.ended);
    return true;
}

static bool is_ready(int descriptor)
{
    struct pollfd asked = {.fd = descriptor, .events = POLLIN};
    return descriptor >= 0 && poll(&asked, 1, 0) > 0;
}

/* Serve for at most so many seconds, or until there is something for Python's code or nothing more to do. */
static void serve_turn(Replayer *self, Turn turn, double most_s)
{
    struct epoll_event ready[MOST_READY];
    double began = now(), last = began;
    while (true) {
        int count = epoll_wait(self->epoll, ready, MOST_READY, 0);
        for (int index = 0; index < count; index++) {
            Connection *connection = find_connection(&self->connections, ready[index].data.fd);
            if (connection != NULL)
                receive(self, connection, &turn);
        }
        bool is_idle = count <= 0;
        while (self->flight_count && land_first(self))
            is_idle = false;
        double moment = now();
        if (self->event_count || self->sample_count >= MOST_SAMPLES || moment - began >= most_s)
            return;
        if (!is_idle) {
            last = moment;
            continue;
        }
        if (!self->flight_count && moment - last >= (self->is_prompt ? turn.poll_s : 0))
            return;
        if (is_ready(turn.others))
            return;
    }
}
