/* The module `normserve_replayer`: answers requests that recur without Python's lock; ../__init__.py says for whom. */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <sys/random.h>
#include <unistd.h>

#include "serving.h"

/* Whether no method serves on another thread; false with an exception.  While one serves, no other may be called. */
static bool check_not_serving(const Replayer *self)
{
    if (self->is_serving)
        PyErr_SetString(PyExc_RuntimeError, "the replayer serves on another thread");
    return !self->is_serving;
}

/* The connection of a descriptor, or NULL with an exception. */
static ReplayConnection *find_open_connection(Replayer *self, int descriptor)
{
    if (!check_not_serving(self))
        return NULL;
    ReplayConnection *connection = find_connection(&self->connections, descriptor);
    if (connection == NULL)
        PyErr_Format(PyExc_KeyError, "no connection has the descriptor %d", descriptor);
    return connection;
}

/* As `find_open_connection`, where the descriptor is the only argument. */
static ReplayConnection *parse_connection(Replayer *self, PyObject *arguments)
{
    int descriptor;
    return PyArg_ParseTuple(arguments, "i", &descriptor) ? find_open_connection(self, descriptor) : NULL;
}

static PyObject *replayer_new(PyTypeObject *type, PyObject *arguments, PyObject *named)
{
    static char *names[] = {"graph_launch", "event_create", "event_record", "event_query", "event_elapsed", NULL};
    unsigned long long launch, create, record, query, elapsed;
    if (!PyArg_ParseTupleAndKeywords(arguments, named, "KKKKK", names, &launch, &create, &record, &query, &elapsed))
        return NULL;
    Replayer *self = (Replayer *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->driver.graph_launch = (int (*)(void *, void *))(uintptr_t)launch;
    self->driver.event_create = (int (*)(void **, unsigned))(uintptr_t)create;
    self->driver.event_record = (int (*)(void *, void *))(uintptr_t)record;
    self->driver.event_query = (int (*)(void *))(uintptr_t)query;
    self->driver.event_elapsed = (int (*)(float *, void *, void *))(uintptr_t)elapsed;
    self->epoll_descriptor = epoll_create1(EPOLL_CLOEXEC);
    uint64_t *state = &self->request_id_state;
    if (self->epoll_descriptor < 0 || getrandom(state, sizeof *state, 0) != sizeof *state) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* Drop all samples.  Called with Python's lock. */
static void drop_samples(Replayer *self)
{
    while (self->first_sampled != NULL) {
        ReplayableRequest *request = self->first_sampled;
        self->first_sampled = request->next_sampled;
        request->sample_count = 0;
        release_request(request);
    }
    self->sample_count = 0;
}

/* What is in flight keeps its memory, which the device may be writing to. */
static void replayer_dealloc(Replayer *self)
{
    for (size_t index = 0; index < self->connections.descriptor_limit; index++)
        if (self->connections.by_descriptor[index] != NULL)
            close_connection(&self->connections, self->connections.by_descriptor[index]);
    drop_samples(self);
    free(self->connections.by_descriptor);
    free(self->events);
    free(self->response);
    if (self->epoll_descriptor >= 0)
        close(self->epoll_descriptor);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *replayer_fileno(Replayer *self, PyObject *nothing)
{
    return PyLong_FromLong(self->epoll_descriptor);
}

static PyObject *replayer_add_connection(Replayer *self, PyObject *arguments)
{
    int descriptor;
    if (!PyArg_ParseTuple(arguments, "i", &descriptor) || !check_not_serving(self))
        return NULL;
    if (descriptor < 0 || find_connection(&self->connections, descriptor) != NULL)
        return PyErr_Format(PyExc_ValueError, "the descriptor %d is in use or is none", descriptor);
    if (open_connection(&self->connections, descriptor) == NULL)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *replayer_set_receiving(Replayer *self, PyObject *arguments)
{
    int descriptor, wanted;
    if (!PyArg_ParseTuple(arguments, "ip", &descriptor, &wanted) || find_open_connection(self, descriptor) == NULL)
        return NULL;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = descriptor};
    int done = epoll_ctl(self->epoll_descriptor, wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, descriptor, &event);
    if (done < 0 && errno != EEXIST && errno != ENOENT)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *replayer_set_caller_state(Replayer *self, PyObject *arguments)
{
    int descriptor, is_within_frame, has_unsent_responses;
    if (!PyArg_ParseTuple(arguments, "ipp", &descriptor, &is_within_frame, &has_unsent_responses))
        return NULL;
    ReplayConnection *connection = find_open_connection(self, descriptor);
    if (connection == NULL)
        return NULL;
    connection->is_within_frame = is_within_frame;
    connection->has_unsent_responses = has_unsent_responses;
    Py_RETURN_NONE;
}

static PyObject *replayer_remove_connection(Replayer *self, PyObject *arguments)
{
    ReplayConnection *connection = parse_connection(self, arguments);
    if (connection == NULL)
        return NULL;
    epoll_ctl(self->epoll_descriptor, EPOLL_CTL_DEL, connection->descriptor, NULL);
    close_connection(&self->connections, connection);
    Py_RETURN_NONE;
}

/* Copy the handles of a sequence of pairs; false with an exception. */
static bool add_part_events(ReplayableRequest *request, PyObject *pairs)
{
    PyObject *parts = PySequence_Fast(pairs, "stage events are a sequence");
    if (parts == NULL)
        return false;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(parts);
    request->part_events = calloc((size_t)count + 1, sizeof *request->part_events);
    if (request->part_events == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t index = 0; index < count && !PyErr_Occurred(); index++) {
        unsigned long long copied_in, computed;
        PyObject *pair = PySequence_Fast_GET_ITEM(parts, index);
        if (!PyTuple_Check(pair))
            PyErr_SetString(PyExc_TypeError, "the stage events of a part are a pair of handles");
        else if (PyArg_ParseTuple(pair, "KK", &copied_in, &computed)) {
            request->part_events[index] = (PartEventPair){(void *)(uintptr_t)copied_in, (void *)(uintptr_t)computed};
            request->part_count++;
        }
    }
    Py_DECREF(parts);
    return !PyErr_Occurred();
}

static PyObject *replayer_add_replay(Replayer *self, PyObject *arguments)
{
    int descriptor;
    const char *content, *results;
    PyObject *part_events;
    Py_ssize_t length, results_length;
    unsigned long long graph, stream;
    long long kernel_bytes, admitted_bytes;
    PyObject *retained;
    if (!PyArg_ParseTuple(arguments, "iy#KKOy#LLO", &descriptor, &content, &length, &graph, &stream, &part_events,
            &results, &results_length, &kernel_bytes, &admitted_bytes, &retained))
        return NULL;
    ReplayConnection *connection = find_open_connection(self, descriptor);
    if (connection == NULL)
        return NULL;
    if (length > RECEIVE_BUFFER_BYTES - PREFIX_BYTES)
        return PyErr_Format(PyExc_ValueError, "a frame of %zd bytes is too long", length);
    ReplayableRequest *request = new_request(content, (size_t)length, results, (size_t)results_length);
    if (request == NULL)
        return PyErr_NoMemory();
    if (!add_part_events(request, part_events)) {
        release_request(request);
        return NULL;
    }
    request->graph = (void *)(uintptr_t)graph;
    request->stream = (void *)(uintptr_t)stream;
    request->kernel_bytes = kernel_bytes;
    request->admitted_bytes = admitted_bytes;
    request->retained = Py_NewRef(retained);
    add_request(&self->connections, connection, request, generate_request_id(&self->request_id_state));
    Py_RETURN_NONE;
}

static PyObject *replayer_remove_replays(Replayer *self, PyObject *arguments)
{
    ReplayConnection *connection = parse_connection(self, arguments);
    if (connection == NULL)
        return NULL;
    remove_requests(&self->connections, connection);
    Py_RETURN_NONE;
}

static PyObject *replayer_remove_all_replays(Replayer *self, PyObject *nothing)
{
    if (!check_not_serving(self))
        return NULL;
    for (size_t index = 0; index < self->connections.descriptor_limit; index++)
        if (self->connections.by_descriptor[index] != NULL)
            remove_requests(&self->connections, self->connections.by_descriptor[index]);
    Py_RETURN_NONE;
}

/* An event as Python's tuple; releases what the event has. */
static PyObject *convert_event(ReplayerEvent *event)
{
    PyObject *found;
    if (event->request != NULL)
        found = Py_BuildValue("iiIiO", event->kind, event->descriptor, event->tag, event->driver_code,
            event->request->retained);
    else
        found = Py_BuildValue("iiIiy#", event->kind, event->descriptor, event->tag, event->driver_code,
            event->data == NULL ? "" : event->data, (Py_ssize_t)event->data_length);
    free(event->data);
    if (event->request != NULL)
        release_request(event->request);
    return found;
}

static PyObject *replayer_serve(Replayer *self, PyObject *arguments)
{
    ServeLimits limits;
    int may_launch;
    long long requests, bytes;
    if (!PyArg_ParseTuple(arguments, "LLpdid", &requests, &bytes, &may_launch, &limits.poll_s,
            &limits.other_descriptor, &limits.max_s)
        || !check_not_serving(self))
        return NULL;
    limits.requests_left = requests;
    limits.bytes_left = bytes;
    limits.may_launch = may_launch;
    self->is_serving = true;
    Py_BEGIN_ALLOW_THREADS
    serve_until(self, limits);
    Py_END_ALLOW_THREADS
    self->is_serving = false;
    size_t count = self->event_count;
    self->event_count = 0;
    PyObject *events = PyList_New(0);
    for (size_t index = 0; index < count; index++) {
        PyObject *event = convert_event(&self->events[index]);
        if (event == NULL || events == NULL || PyList_Append(events, event) < 0)
            Py_CLEAR(events);
        Py_XDECREF(event);
    }
    return events;
}

static PyObject *replayer_take_samples(Replayer *self, PyObject *nothing)
{
    if (!check_not_serving(self))
        return NULL;
    PyObject *found = PyList_New(0);
    const ReplayableRequest *request = self->first_sampled;
    for (; found != NULL && request != NULL; request = request->next_sampled) {
        PyObject *samples = PyList_New((Py_ssize_t)request->sample_count);
        for (size_t index = 0; samples != NULL && index < request->sample_count; index++) {
            const ReplayTimes *times = &request->samples[index];
            PyObject *sample = Py_BuildValue(
                "ddddddd", times->received_at, times->launched_at, times->stages.copy_in, times->stages.kernel,
                times->stages.copy_out, times->responding_at, times->responded_at);
            if (sample == NULL)
                Py_CLEAR(samples);
            else
                PyList_SET_ITEM(samples, (Py_ssize_t)index, sample);
        }
        PyObject *of_request = samples == NULL ? NULL : Py_BuildValue("ON", request->retained, samples);
        if (of_request == NULL || PyList_Append(found, of_request) < 0)
            Py_CLEAR(found);
        Py_XDECREF(of_request);
    }
    if (found != NULL)
        drop_samples(self);
    return found;
}

static PyObject *replayer_count_launches(Replayer *self, PyObject *arguments)
{
    ReplayConnection *connection = parse_connection(self, arguments);
    return connection == NULL ? NULL : PyLong_FromLong(connection->launch_count);
}

static PyObject *replayer_count_all(Replayer *self, PyObject *nothing)
{
    return Py_BuildValue("nLn", (Py_ssize_t)self->launch_count, (long long)self->admitted_bytes,
        (Py_ssize_t)self->sample_count);
}

static PyMethodDef methods[] = {
    {"fileno", (PyCFunction)replayer_fileno, METH_NOARGS, NULL},
    {"add_connection", (PyCFunction)replayer_add_connection, METH_VARARGS, NULL},
    {"remove_connection", (PyCFunction)replayer_remove_connection, METH_VARARGS, NULL},
    {"set_receiving", (PyCFunction)replayer_set_receiving, METH_VARARGS, NULL},
    {"set_caller_state", (PyCFunction)replayer_set_caller_state, METH_VARARGS, NULL},
    {"add_replay", (PyCFunction)replayer_add_replay, METH_VARARGS, NULL},
    {"remove_replays", (PyCFunction)replayer_remove_replays, METH_VARARGS, NULL},
    {"remove_all_replays", (PyCFunction)replayer_remove_all_replays, METH_NOARGS, NULL},
    {"serve", (PyCFunction)replayer_serve, METH_VARARGS, NULL},
    {"take_samples", (PyCFunction)replayer_take_samples, METH_NOARGS, NULL},
    {"count_launches", (PyCFunction)replayer_count_launches, METH_VARARGS, NULL},
    {"count_all", (PyCFunction)replayer_count_all, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, replayer_new},
    {Py_tp_dealloc, replayer_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "normserve_replayer.Replayer",
    .basicsize = sizeof(Replayer),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

static int add_contents(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL)
        return -1;
    int done = PyModule_AddObjectRef(module, "Replayer", type);
    Py_DECREF(type);
    return done;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, add_contents},
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "normserve_replayer",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit_normserve_replayer(void)
{
    return PyModuleDef_Init(&definition);
}
