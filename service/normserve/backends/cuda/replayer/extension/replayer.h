/* What a replayer has: connections, launches in flight, and what is to be handed to Python's code. */

#pragma once

#include <time.h>

#include "connections.h"
#include "driver.h"

#define RECEIVED_BYTES (64 * 1024)
/* Launches that have not ended; what comes beyond them waits in Python's queue, where others can overtake it. */
#define MOST_FLIGHTS 32
/* Connections that are looked at in one turn. */
#define MOST_READY 32
/* Samples are collected before there are more. */
#define MOST_SAMPLES 4096

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
    /* In the order of their launches; those of one stream end in this order. */
    Flight flights[MOST_FLIGHTS];
    size_t flight_count;
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
