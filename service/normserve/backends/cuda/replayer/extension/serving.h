/* Receives frames, launches the graphs of replayable requests, and responds when those are over; without Python's lock.
 *
 * What is not known, or may not be launched now, goes to Python's code as it came, and so does the rest of a response
 * that a client does not read.
 */

#pragma once

#include <poll.h>
#include <sys/epoll.h>

#include "launches.h"

/* What one call of `serve` may do. */
typedef struct {
    /* What may still be admitted. */
    int64_t requests_left, bytes_left;
    bool may_launch;
    /* How long to poll for a request that closely follows a response. */
    double poll_s;
    /* The call ends when this is readable; -1 without one. */
    int other_descriptor;
    /* The call ends after about so many seconds. */
    double max_s;
} ServeLimits;

/* Launch the replayable requests at the beginning of the received bytes; returns how many bytes those are. */
static size_t launch_replayable(
    Replayer *self, ReplayConnection *connection, size_t length, double received_at, ServeLimits *limits)
{
    size_t position = 0;
    if (!limits->may_launch || connection->is_within_frame)
        return 0;
    while (length - position >= PREFIX_BYTES) {
        const unsigned char *prefix = (const unsigned char *)self->receive_buffer + position;
        size_t content_length = read_u32(prefix);
        if (content_length > length - position - PREFIX_BYTES || self->launch_count == MAX_LAUNCHES)
            break;
        const char *content = self->receive_buffer + position + PREFIX_BYTES;
        ReplayableRequest *request = find_request(connection, content, content_length);
        if (request == NULL || limits->requests_left < 1 || limits->bytes_left < request->admitted_bytes
            || !launch_request(self, connection, request, read_u32(prefix + 4), received_at))
            break;
        limits->requests_left--;
        limits->bytes_left -= request->admitted_bytes;
        position += PREFIX_BYTES + content_length;
    }
    return position;
}

/* Receive what has come on a connection: launch its replayable requests, and leave the rest to Python's code. */
static void receive_frames(Replayer *self, ReplayConnection *connection, ServeLimits *limits)
{
    ReplayerEvent event = {.kind = RECEIVED, .descriptor = connection->descriptor};
    ssize_t length = recv(connection->descriptor, self->receive_buffer, RECEIVE_BUFFER_BYTES, MSG_DONTWAIT);
    if (length < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return;
    if (length <= 0) {
        add_event(self, event, NULL, 0);
        return;
    }
    double received_at = read_clock();
    size_t launched = launch_replayable(self, connection, (size_t)length, received_at, limits);
    if (launched)
        self->was_request_prompt = received_at - self->last_responded_at <= limits->poll_s;
    if (launched < (size_t)length
        && !add_event(self, event, self->receive_buffer + launched, (size_t)length - launched)) {
        /* Bytes are lost: the connection cannot go on. */
        shutdown(connection->descriptor, SHUT_RDWR);
    }
}

/* Whether a descriptor is readable. */
static bool has_input(int descriptor)
{
    struct pollfd asked = {.fd = descriptor, .events = POLLIN};
    return descriptor >= 0 && poll(&asked, 1, 0) > 0;
}

/* Serve until there is something for Python's code, nothing more to do, or a limit is reached. */
static void serve_until(Replayer *self, ServeLimits limits)
{
    struct epoll_event ready[MAX_READY];
    double began_at = read_clock(), last_busy_at = began_at;
    while (true) {
        int count = epoll_wait(self->epoll_descriptor, ready, MAX_READY, 0);
        for (int index = 0; index < count; index++) {
            ReplayConnection *connection = find_connection(&self->connections, ready[index].data.fd);
            if (connection != NULL)
                receive_frames(self, connection, &limits);
        }
        bool is_idle = !complete_launches(self) && count <= 0;
        double moment = read_clock();
        if (self->event_count || self->sample_count >= MAX_SAMPLES || moment - began_at >= limits.max_s)
            return;
        if (!is_idle) {
            last_busy_at = moment;
            continue;
        }
        if (!self->launch_count && moment - last_busy_at >= (self->was_request_prompt ? limits.poll_s : 0))
            return;
        if (has_input(limits.other_descriptor))
            return;
    }
}
