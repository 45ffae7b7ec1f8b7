/* The functions of the CUDA driver that are used here, by their addresses: nothing is linked. */

#pragma once

#define CUDA_SUCCESS 0
#define CUDA_ERROR_NOT_READY 600

typedef struct {
    int (*graph_launch)(void *graph, void *stream);
    int (*event_create)(void **event, unsigned flags);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*event_elapsed)(float *milliseconds, void *start_event, void *end_event);
} CudaDriver;
