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
    /* Of the requests, in the same order: what is looked through for each frame lies side by side. */
    uint64_t hashes[MOST_KNOWN];
    Request *known[MOST_KNOWN];
} Connection;

typedef struct {
    Connection **by_descriptor;
    size_t size;
    /* Of all connections. */
    size_t known_count;
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
static void forget_requests(Connections *all, Connection *connection)
{
    size_t count = connection->known_count;
    connection->known_count = 0;
    all->known_count -= count;
    for (size_t index = 0; index < count; index++)
        release_request(connection->known[index]);
}

static void close_connection(Connections *all, Connection *connection)
{
    all->by_descriptor[connection->descriptor] = NULL;
    connection->is_open = false;
    forget_requests(all, connection);
    release_connection(connection);
}

/* The place of a request with the same content, or `known_count`. */
static size_t place_of(const Connection *connection, const char *content, size_t length)
{
    uint64_t hash = hash_of(content, length);
    size_t place = 0;
    for (; place < connection->known_count; place++) {
        const Request *request = connection->known[place];
        if (connection->hashes[place] == hash && request->length == length &&
            !memcmp(request->content, content, length))
            break;
    }
    return place;
}

static Request *find_request(const Connection *connection, const char *content, size_t length)
{
    size_t place = place_of(connection, content, length);
    return place < connection->known_count ? connection->known[place] : NULL;
}

/* Know a request from now on, in place of the one with the same content, or of any if there are too many; a connection
 * that has none while there are too many of all gets none.  Called with Python's lock. */
static void know_request(Connections *all, Connection *connection, Request *request, uint64_t random)
{
    size_t place = place_of(connection, request->content, request->length), count = connection->known_count;
    bool is_full = count == MOST_KNOWN || all->known_count == MOST_KNOWN_OF_ALL;
    if (place == count && is_full) {
        if (!count) {
            release_request(request);
            return;
        }
        place = random % count;
    }
    Request *other = place < count ? connection->known[place] : NULL;
    connection->known[place] = request;
    connection->hashes[place] = hash_of(request->content, request->length);
    if (other != NULL) {
        release_request(other);
    } else {
        connection->known_count++;
        all->known_count++;
    }
}
