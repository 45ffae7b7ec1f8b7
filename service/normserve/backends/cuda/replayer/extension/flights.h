/* Launches of known requests, from their beginning to their answers. */

#pragma once

#include <errno.h>
#include <sys/socket.h>

#include "answers.h"
#include "replayer.h"

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
    self->flights[self->flight_count++] = (Flight){connection, request, tag, received, launched, began, ended, code};
    self->admitted_bytes += request->admitted_bytes;
    request->users++;
    connection->users++;
    connection->flights++;
    return true;
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
        if (!add_event(self, event, self->answer + sent, length - (size_t)sent)) {
            /* Bytes are lost: the connection cannot go on. */
            shutdown(connection->descriptor, SHUT_RDWR);
            return false;
        }
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
static bool answer(Replayer *self, const Flight *flight, Stages stages)
{
    Request *request = flight->request;
    double answering = now();
    if (!flight->connection->is_open || !reserve_answer(self, PREFIX_BYTES + request->results_length + LONGEST_REST))
        return false;
    uint64_t name[2] = {next_name(&self->names), next_name(&self->names)};
    double queue_s = flight->launched - flight->received;
    size_t length = write_answer(self->answer, request, flight->tag, name, queue_s, stages);
    if (!send_answer(self, flight->connection, length))
        return false;
    self->last_sent = now();
    Sample sample = {flight->received, flight->launched, stages, answering, self->last_sent};
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

/* Seconds between two events, or less than 0 with the driver's code in `code`. */
static double seconds_between(const Driver *driver, void *began, void *ended, int *code)
{
    float milliseconds = 0;
    int failed = driver->event_elapsed(&milliseconds, began, ended);
    if (failed)
        *code = failed;
    return 1e-3 * (double)milliseconds;
}

/* Of a flight that has ended.  Copy-in lasts until the last part has come; copy-out is what is left of the whole. */
static Stages stages_of(const Driver *driver, const Flight *flight, int *code)
{
    const Request *request = flight->request;
    Stages stages = {0};
    double whole = seconds_between(driver, flight->began, flight->ended, code), before = 0;
    for (size_t part = 0; part < request->mark_count; part++) {
        stages.copy_in = seconds_between(driver, flight->began, request->marks[part].came, code);
        double done = seconds_between(driver, flight->began, request->marks[part].computed, code);
        stages.kernel += done - (before > stages.copy_in ? before : stages.copy_in);
        before = done;
    }
    if (!request->mark_count)
        stages.kernel = whole;
    else if (whole > stages.copy_in + stages.kernel)
        stages.copy_out = whole - stages.copy_in - stages.kernel;
    return stages;
}

/* Answer a flight if it has ended; false where it has not. */
static bool land(Replayer *self, size_t place)
{
    Flight flight = self->flights[place];
    Stages stages = {0};
    int code = flight.code ? flight.code : self->driver.event_query(flight.ended);
    if (code == CUDA_ERROR_NOT_READY)
        return false;
    if (code == CUDA_SUCCESS)
        stages = stages_of(&self->driver, &flight, &code);
    Connection *connection = flight.connection;
    Event event = {.kind = LEFT, .descriptor = connection->descriptor, .tag = flight.tag, .request = flight.request};
    if (code != CUDA_SUCCESS) {
        event.kind = connection->is_open ? FAILED : LEFT;
        event.code = code;
    }
    self->flight_count--;
    memmove(&self->flights[place], &self->flights[place + 1], (self->flight_count - place) * sizeof flight);
    self->admitted_bytes -= flight.request->admitted_bytes;
    connection->flights--;
    /* An event, or the list of those with samples, uses the request on; without memory for either it stays. */
    if (code == CUDA_SUCCESS && answer(self, &flight, stages)) {
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

/* Whether an earlier flight is on the same stream. */
static bool is_behind_another(const Replayer *self, size_t place)
{
    for (size_t earlier = 0; earlier < place; earlier++)
        if (self->flights[earlier].request->stream == self->flights[place].request->stream)
            return true;
    return false;
}

/* Answer all flights that have ended; whether there were any. */
static bool land_all(Replayer *self)
{
    bool is_any = false;
    for (size_t place = 0; place < self->flight_count;) {
        if (!is_behind_another(self, place) && land(self, place))
            is_any = true;
        else
            place++;
    }
    return is_any;
}
