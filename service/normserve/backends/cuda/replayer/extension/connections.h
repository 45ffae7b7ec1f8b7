/* Connections by their descriptors, and the requests that recur on each. */

#pragma once

#include "requests.h"

typedef struct {
    int descriptor;
    /* By launches in flight and by the table of connections; the last one frees it. */
    int reference_count;
    bool is_open;
    /* Python's code has the beginning of a frame: all that comes is for that. */
    bool is_within_frame;
    /* Python's code has responses that the client has not read: all others must follow them. */
    bool has_unsent_responses;
    /* In flight. */
    int launch_count;
    size_t request_count;
    /* Of the requests' contents, in the same order: what is looked through for each frame lies side by side. */
    uint64_t hashes[MAX_CONNECTION_REQUESTS];
    ReplayableRequest *requests[MAX_CONNECTION_REQUESTS];
} ReplayConnection;

typedef struct {
    /* NULL where a descriptor has no connection. */
    ReplayConnection **by_descriptor;
    size_t descriptor_limit;
    /* Of all connections. */
    size_t request_count;
} ConnectionTable;

/* The connection of a descriptor, or NULL. */
static ReplayConnection *find_connection(const ConnectionTable *table, int descriptor)
{
    return descriptor >= 0 && (size_t)descriptor < table->descriptor_limit ? table->by_descriptor[descriptor] : NULL;
}

/* Add a connection; NULL without memory. */
static ReplayConnection *open_connection(ConnectionTable *table, int descriptor)
{
    if ((size_t)descriptor >= table->descriptor_limit) {
        size_t limit = (size_t)descriptor + 64;
        ReplayConnection **grown = realloc(table->by_descriptor, limit * sizeof *grown);
        if (grown == NULL)
            return NULL;
        memset(grown + table->descriptor_limit, 0, (limit - table->descriptor_limit) * sizeof *grown);
        table->by_descriptor = grown;
        table->descriptor_limit = limit;
    }
    ReplayConnection *connection = calloc(1, sizeof *connection);
    if (connection == NULL)
        return NULL;
    connection->descriptor = descriptor;
    connection->reference_count = 1;
    connection->is_open = true;
    table->by_descriptor[descriptor] = connection;
    return connection;
}

/* One reference less; the last one frees the connection. */
static void release_connection(ReplayConnection *connection)
{
    if (--connection->reference_count == 0)
        free(connection);
}

/* Remove all requests of a connection; those in flight go on.  Called with Python's lock. */
static void remove_requests(ConnectionTable *table, ReplayConnection *connection)
{
    size_t count = connection->request_count;
    connection->request_count = 0;
    table->request_count -= count;
    for (size_t index = 0; index < count; index++)
        release_request(connection->requests[index]);
}

/* Remove a connection from the table.  Called with Python's lock. */
static void close_connection(ConnectionTable *table, ReplayConnection *connection)
{
    table->by_descriptor[connection->descriptor] = NULL;
    connection->is_open = false;
    remove_requests(table, connection);
    release_connection(connection);
}

/* The index of the request with this content, or `request_count`. */
static size_t find_request_index(const ReplayConnection *connection, const char *content, size_t length)
{
    uint64_t hash = hash_content(content, length);
    size_t index = 0;
    for (; index < connection->request_count; index++) {
        const ReplayableRequest *request = connection->requests[index];
        if (connection->hashes[index] == hash && request->content_length == length &&
            !memcmp(request->content, content, length))
            break;
    }
    return index;
}

/* The request with this content, or NULL. */
static ReplayableRequest *find_request(const ReplayConnection *connection, const char *content, size_t length)
{
    size_t index = find_request_index(connection, content, length);
    return index < connection->request_count ? connection->requests[index] : NULL;
}

/* Replay a request from now on, in place of the one with the same content, or of a random one if there are too many; a
 * connection that has none while there are too many of all gets none.  Called with Python's lock. */
static void add_request(
    ConnectionTable *table, ReplayConnection *connection, ReplayableRequest *request, uint64_t random)
{
    size_t index = find_request_index(connection, request->content, request->content_length);
    size_t count = connection->request_count;
    bool is_full = count == MAX_CONNECTION_REQUESTS || table->request_count == MAX_REQUESTS;
    if (index == count && is_full) {
        if (!count) {
            release_request(request);
            return;
        }
        index = random % count;
    }
    ReplayableRequest *other = index < count ? connection->requests[index] : NULL;
    connection->requests[index] = request;
    connection->hashes[index] = hash_content(request->content, request->content_length);
    if (other != NULL) {
        release_request(other);
    } else {
        connection->request_count++;
        table->request_count++;
    }
}
