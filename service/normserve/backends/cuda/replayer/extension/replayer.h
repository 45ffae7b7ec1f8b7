/* What a replayer has: connections, launches in flight, and events for Python's code. */

#pragma once

#include <time.h>

#include "connections.h"
#include "driver.h"

#define RECEIVE_BUFFER_BYTES (64 * 1024)
/* Launches that have not ended; what comes beyond them waits in Python's queue, where others can overtake it. */
#define MAX_LAUNCHES 32
/* Connections that are looked at in one turn. */
#define MAX_READY 32
/* Samples are collected before there are more. */
#define MAX_SAMPLES 4096

typedef enum {
    /* Bytes that have come; without any, the client has gone. */
    RECEIVED,
    /* The rest of a response. */
    UNSENT,
    /* A launch has failed, by the driver's code: it has no response yet. */
    FAILED,
    /* The client had gone before its response was sent. */
    LEFT,
} EventKind;

/* What Python's code has to do. */
typedef struct {
    EventKind kind;
    /* Of the connection. */
    int descriptor;
    /* Of the request's frame. */
    uint32_t tag;
    int driver_code;
    char *data;
    size_t data_length;
    /* A reference; NULL where the event is of no request. */
    ReplayableRequest *request;
} ReplayerEvent;

/* A launch that has not ended. */
typedef struct {
    ReplayConnection *connection;
    ReplayableRequest *request;
    uint32_t tag;
    double received_at, launched_at;
    /* CUDA events before and after the graph. */
    void *start_event, *end_event;
    /* The driver's error where `end_event` could not be recorded. */
    int driver_code;
} ReplayLaunch;

typedef struct {
    PyObject_HEAD
    CudaDriver driver;
    ConnectionTable connections;
    int epoll_descriptor;
    /* In the order of their launches; those of one stream end in this order. */
    ReplayLaunch launches[MAX_LAUNCHES];
    size_t launch_count;
    /* Of these launches. */
    int64_t admitted_bytes;
    void *spare_cuda_events[2 * MAX_LAUNCHES];
    size_t spare_cuda_event_count;
    ReplayerEvent *events;
    size_t event_count, event_capacity;
    /* The list of the requests that have samples, and how many samples that are. */
    ReplayableRequest *first_sampled;
    size_t sample_count;
    uint64_t request_id_state;
    double last_responded_at;
    /* Whether the last request came soon after a response. */
    bool was_request_prompt;
    bool is_serving;
    /* A response before it is sent. */
    char *response;
    size_t response_capacity;
    char receive_buffer[RECEIVE_BUFFER_BYTES];
} Replayer;

/* Seconds by the clock of `time.perf_counter`. */
static double read_clock(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Add an event with a copy of the data.  False without memory: then the connection, if it is one's, must be closed,
 * which is what an event without data says of it; the table of events always has room for one of each connection that
 * is looked at. */
static bool add_event(Replayer *self, ReplayerEvent event, const char *data, size_t length)
{
    if (self->event_count == self->event_capacity) {
        size_t capacity = self->event_capacity ? 2 * self->event_capacity : 4 * MAX_READY;
        ReplayerEvent *events = realloc(self->events, capacity * sizeof *events);
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
        event.data_length = length;
    }
    self->events[self->event_count++] = event;
    return true;
}

/* A CUDA event, a spare one if possible; NULL if the driver fails. */
static void *reserve_event(Replayer *self)
{
    void *event = NULL;
    if (self->spare_cuda_event_count)
        return self->spare_cuda_events[--self->spare_cuda_event_count];
    return self->driver.event_create(&event, 0) == CUDA_SUCCESS ? event : NULL;
}

/* Keep a CUDA event that is not used any more as a spare one. */
static void release_event(Replayer *self, void *event)
{
    if (event != NULL && self->spare_cuda_event_count < 2 * MAX_LAUNCHES)
        self->spare_cuda_events[self->spare_cuda_event_count++] = event;
}
