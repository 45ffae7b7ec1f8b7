/* Requests that recur on a connection: a frame's content, and the launch and the response that it leads to. */

#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Of one connection, and of all: each keeps a graph, which takes memory of the driver and of the device.  A training
 * step of a model with a hundred norms has two hundred requests, and as many more where results of the step before are
 * still held. */
#define MAX_CONNECTION_REQUESTS 1024
#define MAX_REQUESTS 4096

/* Seconds that a launch takes. */
typedef struct {
    double copy_in, kernel, copy_out;
} StageDurations;

/* The times of one replay, by the clock of `time.perf_counter`: when the request had come and when its launch began,
 * its stages, and when the response was begun and had been sent. */
typedef struct {
    double received_at, launched_at;
    StageDurations stages;
    double responding_at, responded_at;
} ReplayTimes;

/* The CUDA events at the end of the copy-in and of the computation of one part of a launch. */
typedef struct {
    void *copied_in, *computed;
} PartEventPair;

/* A request whose frame has been received before and whose launch is captured. */
typedef struct ReplayableRequest {
    /* By launches in flight, the connection and the list of those that have samples; the last one frees it. */
    int reference_count;
    /* Of the frame, without its prefix. */
    char *content;
    size_t content_length;
    /* The driver's handles. */
    void *graph, *stream;
    /* One pair for each part; none where nothing is copied. */
    PartEventPair *part_events;
    size_t part_count;
    /* The results' description in the response, in JSON. */
    char *results;
    size_t results_length;
    /* The fewest bytes that the launch must move. */
    int64_t kernel_bytes;
    /* What the request's permit counts. */
    int64_t admitted_bytes;
    /* A Python object that keeps the graph and all memory that it reads and writes. */
    PyObject *retained;
    /* What was measured and has not been collected yet. */
    ReplayTimes *samples;
    size_t sample_count, sample_capacity;
    /* In the list of the requests that have samples. */
    struct ReplayableRequest *next_sampled;
} ReplayableRequest;

static uint64_t hash_content(const char *content, size_t length)
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

/* Copy a frame's content and its results' description; NULL without memory. */
static ReplayableRequest *new_request(const char *content, size_t length, const char *results, size_t results_length)
{
    ReplayableRequest *request = calloc(1, sizeof *request);
    if (request == NULL)
        return NULL;
    request->reference_count = 1;
    request->content_length = length;
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

/* One reference less; the last one frees the request.  Called with Python's lock. */
static void release_request(ReplayableRequest *request)
{
    if (--request->reference_count > 0)
        return;
    Py_XDECREF(request->retained);
    free(request->content);
    free(request->part_events);
    free(request->samples);
    free(request);
}

/* Whether there was memory for it: metrics may miss a request, a client may not miss its response. */
static bool add_sample(ReplayableRequest *request, ReplayTimes sample)
{
    if (request->sample_count == request->sample_capacity) {
        size_t capacity = request->sample_capacity ? 2 * request->sample_capacity : 16;
        ReplayTimes *samples = realloc(request->samples, capacity * sizeof *samples);
        if (samples == NULL)
            return false;
        request->samples = samples;
        request->sample_capacity = capacity;
    }
    request->samples[request->sample_count++] = sample;
    return true;
}
