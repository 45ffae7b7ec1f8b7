/* Connections by their descriptors, and the requests that recur on each. */

#pragma once

#include "requests.h"

typedef struct {
    int descriptor;
    /* Flights, and the table of connections; the last one frees it. */
    int users;
    bool is_open;
    /* Python's code has the beginning of a frame: all that comes is for that. */
    bool is_within_frame;
    /* Python's code has answers that the client has not read: all others must follow them. */
    bool is_behind;
    int flights;
    size_t known_count;
    Request *known[MOST_KNOWN];
} Connection;

typedef struct {
    Connection **by_descriptor;
    size_t size;
} Connections;

static Connection *find_connection(const Connections *all, int descriptor)
{
    return descriptor >= 0 && (size_t)descriptor < all->size ? all->by_descriptor[descriptor] : NULL;
}

/* NULL without memory. */
static Connection *open_connection(Connections *all, int descriptor)
{
    if ((size_t)descriptor >= all->size) {
        size_t size = (size_t)descriptor + 64;
        Connection **grown = realloc(all->by_descriptor, size * sizeof *grown);
        if (grown == NULL)
            return NULL;
        memset(grown + all->size, 0, (size - all->size) * sizeof *grown);
        all->by_descriptor = grown;
        all->size = size;
    }
    Connection *connection = calloc(1, sizeof *connection);
    if (connection == NULL)
        return NULL;
    connection->descriptor = descriptor;
    connection->users = 1;
    connection->is_open = true;
    all->by_descriptor[descriptor] = connection;
    return connection;
}

static void release_connection(Connection *connection)
{
    if (--connection->users == 0)
        free(connection);
}

/* Forget all requests; those in flight go on.  Called with Python's lock. */
static void forget_requests(Connection *connection)
{
    size_t count = connection->known_count;
    connection->known_count = 0;
    for (size_t index = 0; index < count; index++)
        release_request(connection->known[index]);
}

static void close_connection(Connections *all, Connection *connection)
{
    all->by_descriptor[connection->descriptor] = NULL;
    connection->is_open = false;
    forget_requests(connection);
    release_connection(connection);
}

static Request *find_request(const Connection *connection, const char *content, size_t length)
{
    uint64_t hash = hash_of(content, length);
    for (size_t index = 0; index < connection->known_count; index++) {
        Request *request = connection->known[index];
        if (request->hash == hash && request->length == length && !memcmp(request->content, content, length))
            return request;
    }
    return NULL;
}
