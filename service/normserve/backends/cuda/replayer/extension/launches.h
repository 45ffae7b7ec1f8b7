/* Launches of replayable requests, from their beginning to their responses. */

#pragma once

#include <errno.h>
#include <sys/socket.h>

#include "replayer.h"
#include "responses.h"

/* Launch a request's graph; false where nothing was launched. */
static bool launch_request(
    Replayer *self, ReplayConnection *connection, ReplayableRequest *request, uint32_t tag, double received_at)
{
    const CudaDriver *driver = &self->driver;
    void *start_event = reserve_event(self), *end_event = reserve_event(self);
    double launched_at = read_clock();
    if (start_event == NULL || end_event == NULL || driver->event_record(start_event, request->stream) != CUDA_SUCCESS
        || driver->graph_launch(request->graph, request->stream) != CUDA_SUCCESS) {
        release_event(self, start_event);
        release_event(self, end_event);
        return false;
    }
    /* From here on the device may be writing: whatever happens, this is in flight. */
    int code = driver->event_record(end_event, request->stream);
    self->launches[self->launch_count++] =
        (ReplayLaunch){connection, request, tag, received_at, launched_at, start_event, end_event, code};
    self->admitted_bytes += request->admitted_bytes;
    request->reference_count++;
    connection->reference_count++;
    connection->launch_count++;
    return true;
}

/* Send `self->response`, or leave what the client does not read to Python's code; false where the client has gone. */
static bool send_response(Replayer *self, ReplayConnection *connection, size_t length)
{
    ReplayerEvent event = {.kind = UNSENT, .descriptor = connection->descriptor};
    ssize_t sent = 0;
    if (!connection->has_unsent_responses) {
        sent = send(connection->descriptor, self->response, length, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
            sent = 0;
    }
    if (sent < 0)
        return false;
    if ((size_t)sent < length) {
        connection->has_unsent_responses = true;
        if (!add_event(self, event, self->response + sent, length - (size_t)sent)) {
            /* Bytes are lost: the connection cannot go on. */
            shutdown(connection->descriptor, SHUT_RDWR);
            return false;
        }
    }
    return true;
}

/* Make room for a response; false without memory. */
static bool reserve_response(Replayer *self, size_t length)
{
    if (length <= self->response_capacity)
        return true;
    char *response = realloc(self->response, length);
    if (response == NULL)
        return false;
    self->response = response;
    self->response_capacity = length;
    return true;
}

/* Respond to the request of a launch that has ended; false where the client has gone. */
static bool respond(Replayer *self, const ReplayLaunch *launch, StageDurations stages)
{
    ReplayableRequest *request = launch->request;
    double responding_at = read_clock();
    size_t capacity = PREFIX_BYTES + request->results_length + MAX_BYTES_BESIDE_RESULTS;
    if (!launch->connection->is_open || !reserve_response(self, capacity))
        return false;
    uint64_t *state = &self->request_id_state;
    uint64_t request_id[2] = {generate_request_id(state), generate_request_id(state)};
    double queue_s = launch->launched_at - launch->received_at;
    size_t length = write_response(self->response, request, launch->tag, request_id, queue_s, stages);
    if (!send_response(self, launch->connection, length))
        return false;
    self->last_responded_at = read_clock();
    ReplayTimes sample = {launch->received_at, launch->launched_at, stages, responding_at, self->last_responded_at};
    if (add_sample(request, sample)) {
        self->sample_count++;
        if (request->sample_count == 1) {
            request->reference_count++;
            request->next_sampled = self->first_sampled;
            self->first_sampled = request;
        }
    }
    return true;
}

/* Seconds between two CUDA events, or less than 0 with the driver's code in `code`. */
static double seconds_between(const CudaDriver *driver, void *start_event, void *end_event, int *code)
{
    float milliseconds = 0;
    int failed = driver->event_elapsed(&milliseconds, start_event, end_event);
    if (failed)
        *code = failed;
    return 1e-3 * (double)milliseconds;
}

/* The stages of a launch that has ended.  Copy-in lasts until the last part has come; copy-out is what is left of the
 * whole. */
static StageDurations compute_stage_durations(const CudaDriver *driver, const ReplayLaunch *launch, int *code)
{
    const ReplayableRequest *request = launch->request;
    StageDurations stages = {0};
    double whole = seconds_between(driver, launch->start_event, launch->end_event, code), before = 0;
    for (size_t part = 0; part < request->part_count; part++) {
        stages.copy_in = seconds_between(driver, launch->start_event, request->part_events[part].copied_in, code);
        double done = seconds_between(driver, launch->start_event, request->part_events[part].computed, code);
        stages.kernel += done - (before > stages.copy_in ? before : stages.copy_in);
        before = done;
    }
    if (!request->part_count)
        stages.kernel = whole;
    else if (whole > stages.copy_in + stages.kernel)
        stages.copy_out = whole - stages.copy_in - stages.kernel;
    return stages;
}

/* End a launch, with a response or an event, if the device is done with it; false where it is not. */
static bool complete_launch(Replayer *self, size_t index)
{
    ReplayLaunch launch = self->launches[index];
    StageDurations stages = {0};
    int code = launch.driver_code ? launch.driver_code : self->driver.event_query(launch.end_event);
    if (code == CUDA_ERROR_NOT_READY)
        return false;
    if (code == CUDA_SUCCESS)
        stages = compute_stage_durations(&self->driver, &launch, &code);
    ReplayConnection *connection = launch.connection;
    ReplayerEvent event = {
        .kind = LEFT, .descriptor = connection->descriptor, .tag = launch.tag, .request = launch.request};
    if (code != CUDA_SUCCESS) {
        event.kind = connection->is_open ? FAILED : LEFT;
        event.driver_code = code;
    }
    self->launch_count--;
    memmove(&self->launches[index], &self->launches[index + 1], (self->launch_count - index) * sizeof launch);
    self->admitted_bytes -= launch.request->admitted_bytes;
    connection->launch_count--;
    /* An event, or the list of those with samples, uses the request on; without memory for either it stays. */
    if (code == CUDA_SUCCESS && respond(self, &launch, stages)) {
        if (launch.request->sample_count)
            launch.request->reference_count--;
    } else {
        add_event(self, event, NULL, 0);
    }
    release_connection(connection);
    release_event(self, launch.start_event);
    release_event(self, launch.end_event);
    return true;
}

/* Whether an earlier launch is on the same stream. */
static bool has_earlier_launch(const Replayer *self, size_t index)
{
    for (size_t earlier = 0; earlier < index; earlier++)
        if (self->launches[earlier].request->stream == self->launches[index].request->stream)
            return true;
    return false;
}

/* End all launches that the device is done with; whether there were any. */
static bool complete_launches(Replayer *self)
{
    bool is_any = false;
    for (size_t index = 0; index < self->launch_count;) {
        if (!has_earlier_launch(self, index) && complete_launch(self, index))
            is_any = true;
        else
            index++;
    }
    return is_any;
}
