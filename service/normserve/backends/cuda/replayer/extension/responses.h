/* Responses to operations, as docs/local-protocol.md specifies them. */

#pragma once

#include <inttypes.h>
#include <stdio.h>

#include "requests.h"

/* Of a frame: the length of its content, and a tag; both little-endian. */
#define PREFIX_BYTES 8
/* The most bytes of a response without its results. */
#define MAX_BYTES_BESIDE_RESULTS 512

static uint32_t read_u32(const unsigned char *from)
{
    return from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}

static void write_u32(unsigned char *to, uint32_t value)
{
    for (int index = 0; index < 4; index++)
        to[index] = (unsigned char)(value >> 8 * index);
}

/* Half of a request's ID, which is no secret: splitmix64, begun at random. */
static uint64_t generate_request_id(uint64_t *state)
{
    uint64_t mixed = *state += 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBu;
    return mixed ^ mixed >> 31;
}

/* Milliseconds with six digits; without `%f`, which may write a comma. */
#define MS_FORMAT "%" PRId64 ".%06" PRId64
#define MS_OF(seconds) (int64_t)((seconds) * 1e9) / 1000000, (int64_t)((seconds) * 1e9) % 1000000

/* Write a response's frame to memory for the results and MAX_BYTES_BESIDE_RESULTS more; returns its length. */
static size_t write_response(
    char *to, const ReplayableRequest *request, uint32_t tag, const uint64_t request_id[2], double queue_s,
    StageDurations stages)
{
    char *content = to + PREFIX_BYTES;
    int64_t bandwidth = stages.kernel > 0 ? (int64_t)((double)request->kernel_bytes / stages.kernel) : 0;
    int head = sprintf(content, "{\"status\":200,\"request_id\":\"%016" PRIx64 "%016" PRIx64 "\",\"results\":",
        request_id[0], request_id[1]);
    memcpy(content + head, request->results, request->results_length);
    char *rest = content + head + request->results_length;
    int tail = sprintf(
        rest,
        ",\"stages_ms\":{\"recv\":0.0,\"queue\":" MS_FORMAT ",\"copy_in\":" MS_FORMAT ",\"kernel\":" MS_FORMAT
        ",\"copy_out\":" MS_FORMAT "},\"kernel_bytes\":%" PRId64 ",\"kernel_bandwidth\":%" PRId64 ",\"batch_size\":1}",
        MS_OF(queue_s), MS_OF(stages.copy_in), MS_OF(stages.kernel), MS_OF(stages.copy_out), request->kernel_bytes,
        bandwidth);
    size_t length = (size_t)head + request->results_length + (size_t)tail;
    write_u32((unsigned char *)to, (uint32_t)length);
    write_u32((unsigned char *)to + 4, tag);
    return PREFIX_BYTES + length;
}
