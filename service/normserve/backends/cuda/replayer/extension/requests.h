/* Requests that recur on a connection: a frame's content, and the launch and the answer that it leads to. */

#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Of one connection, and of all: each keeps a graph, which takes memory of the driver and of the device.  A training
 * step of a model with a hundred norms has two hundred requests, and as many more where results of the step before are
 * still held. */
#define MOST_KNOWN 1024
#define MOST_KNOWN_OF_ALL 4096

/* Seconds that a launch takes. */
typedef struct {
    double copy_in, kernel, copy_out;
} Stages;

/* Moments by the clock of `time.perf_counter`. */
typedef struct {
    double received, launched;
    Stages stages;
    double answering, ended;
} Sample;

/* Of a part of a launch, the events at the end of its copy-in and of its computation. */
typedef struct {
    void *came, *computed;
} Mark;

typedef struct Request {
    /* Flights, the connection's list and the list of those that have samples; the last one frees it. */
    int users;
    size_t length;
    char *content;
    void *graph, *stream;
    /* None where nothing is copied. */
    Mark *marks;
    size_t mark_count;
    /* The results in JSON. */
    char *results;
    size_t results_length;
    int64_t kernel_bytes;
    /* What the request's permit counts. */
    int64_t admitted_bytes;
    /* A Python object that keeps the graph and all memory that it reads and writes. */
    PyObject *held;
    /* What was measured and not been collected yet. */
    Sample *samples;
    size_t sample_count, sample_capacity;
    struct Request *next_sampled;
} Request;

static uint64_t hash_of(const char *content, size_t length)
{
    uint64_t hash = length * 0x9E3779B97F4A7C15u;
    for (size_t position = 0; position < length; position += 8) {
        uint64_t word = 0;
        memcpy(&word, content + position, length - position < 8 ? length - position : 8);
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    return hash;
}

/* NULL without memory. */
static Request *new_request(const char *content, size_t length, const char *results, size_t results_length)
{
    Request *request = calloc(1, sizeof *request);
    if (request == NULL)
        return NULL;
    request->users = 1;
    request->length = length;
    request->results_length = results_length;
    request->content = malloc(length + results_length + 1);
    if (request->content == NULL) {
        free(request);
        return NULL;
    }
    request->results = request->content + length;
    memcpy(request->content, content, length);
    memcpy(request->results, results, results_length);
    return request;
}

/* One user less; called with Python's lock. */
static void release_request(Request *request)
{
    if (--request->users > 0)
        return;
    Py_XDECREF(request->held);
    free(request->content);
    free(request->marks);
    free(request->samples);
    free(request);
}

/* Whether there was memory for it: metrics may miss a request, a client may not miss its answer. */
static bool add_sample(Request *request, Sample sample)
{
    if (request->sample_count == request->sample_capacity) {
        size_t capacity = request->sample_capacity ? 2 * request->sample_capacity : 16;
        Sample *samples = realloc(request->samples, capacity * sizeof *samples);
        if (samples == NULL)
            return false;
        request->samples = samples;
        request->sample_capacity = capacity;
    }
    request->samples[request->sample_count++] = sample;
    return true;
}
