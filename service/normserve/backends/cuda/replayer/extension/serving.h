/* Receives frames, launches what is known to lead to a launch, and answers when it is over; without Python's lock.
 *
 * What is not known, or may not be launched now, goes to Python's code as it came, and so does the rest of an answer
 * that a client does not read.
 */

#pragma once

#include <poll.h>
#include <sys/epoll.h>

#include "flights.h"

/* What a turn may do. */
typedef struct {
    int64_t requests, bytes;
    bool may_launch;
    double poll_s;
    int others;
} Turn;

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
        bool is_idle = !land_all(self) && count <= 0;
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
