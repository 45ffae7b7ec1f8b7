/* A closed-loop client: on each connection, a thread sends the same request again and again and reads each response.
 *
 * usage: client http|raw ADDRESS REQUEST_FILE SECONDS CONNECTIONS
 *   ADDRESS  a port on 127.0.0.1, or the path of a Unix domain socket
 *   http     the file is a whole HTTP request; responses have a Content-Length and must be 200
 *   raw      the file is sent as it is and as many bytes come back
 * Writes one line: responses a second, the median and the 99th percentile of one's time in seconds, and how many
 * processors the client kept busy.  The first fifth of the time is not counted.  A request counts by the share of its
 * time that lies in the rest, so that one that began before or ends after it is neither lost nor counted whole.
 * The median is of requests that were sent in that time, at least one of each connection.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER_BYTES = 256 * 1024 };

/* A connection with its thread, and the times that it measured. */
struct connection {
    pthread_t thread;
    int fd;
    char buffer[BUFFER_BYTES + 1];
    /* Seconds of each response to a request that was sent after `counting_start`. */
    double *times;
    size_t time_count, time_capacity;
    /* Requests answered in the counted time, each by its share. */
    double counted_responses;
};

/* Whether as many bytes come back as are sent, instead of HTTP. */
static int is_raw;
static char *request;
static size_t request_bytes;
/* The time that is counted, by the clock of `read_clock_s`. */
static double counting_start, counting_end;

static void exit_with_error(const char *why) {
    perror(why);
    exit(1);
}

static double read_clock_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* Connects to a port on 127.0.0.1, or to the path of a Unix domain socket, and returns the descriptor. */
static int connect_socket(const char *address) {
    int fd;
    if (strchr(address, '/')) {
        struct sockaddr_un to = {.sun_family = AF_UNIX};
        strncpy(to.sun_path, address, sizeof to.sun_path - 1);
        fd = socket(AF_UNIX, SOCK_STREAM, 0);
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &(int){1 << 22}, sizeof(int));
        if (connect(fd, (struct sockaddr *)&to, sizeof to)) exit_with_error("connect");
        return fd;
    }
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(atoi(address))};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&to, sizeof to)) exit_with_error("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    return fd;
}

static void send_all(int fd, const char *data, size_t left) {
    while (left) {
        ssize_t sent = send(fd, data, left, MSG_NOSIGNAL);
        if (sent <= 0) exit_with_error("send");
        data += sent;
        left -= sent;
    }
}

static void receive_and_drop(struct connection *connection, size_t left) {
    while (left) {
        ssize_t got = recv(connection->fd, connection->buffer, left < BUFFER_BYTES ? left : BUFFER_BYTES, 0);
        if (got <= 0) exit_with_error("recv");
        left -= got;
    }
}

/* Receives a whole HTTP response; ends the program unless that is 200. */
static void receive_response(struct connection *connection) {
    char *buffer = connection->buffer, *stop = NULL;
    size_t held = 0;
    while (!stop) {
        ssize_t got = recv(connection->fd, buffer + held, BUFFER_BYTES - held, 0);
        if (got <= 0) exit_with_error("recv");
        held += got;
        buffer[held] = 0;
        stop = strstr(buffer, "\r\n\r\n");
    }
    if (strncmp(buffer, "HTTP/1.1 200", 12)) {
        fprintf(stderr, "%.200s\n", buffer);
        exit(1);
    }
    char *length = strcasestr(buffer, "\r\ncontent-length:");
    if (!length || length > stop) exit(1);
    receive_and_drop(connection, strtoull(length + 17, NULL, 10) - (held - (stop + 4 - buffer)));
}

/* The share of a request's time that is within the counted time. */
static double compute_counted_share(double sent, double answered) {
    double first = sent > counting_start ? sent : counting_start;
    double last = answered < counting_end ? answered : counting_end;
    return last > first ? (last - first) / (answered - sent) : 0;
}

static void record_time(struct connection *connection, double seconds) {
    if (connection->time_count == connection->time_capacity) {
        connection->time_capacity = connection->time_capacity ? 2 * connection->time_capacity : 4096;
        connection->times = realloc(connection->times, connection->time_capacity * sizeof *connection->times);
        if (!connection->times) exit_with_error("realloc");
    }
    connection->times[connection->time_count++] = seconds;
}

/* A connection's thread: repeats the request until the counted time ends, once at least. */
static void *run_connection(void *argument) {
    struct connection *connection = argument;
    for (double sending = read_clock_s(); sending < counting_end || !connection->time_count;) {
        send_all(connection->fd, request, request_bytes);
        if (is_raw)
            receive_and_drop(connection, request_bytes);
        else
            receive_response(connection);
        double answered = read_clock_s();
        connection->counted_responses += compute_counted_share(sending, answered);
        if (sending >= counting_start) record_time(connection, answered - sending);
        sending = answered;
    }
    return NULL;
}

static int compare_ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The processor time that this process has used. */
static double read_processor_seconds(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    is_raw = !strcmp(argv[1], "raw");
    FILE *file = fopen(argv[3], "rb");
    if (!file) exit_with_error(argv[3]);
    fseek(file, 0, SEEK_END);
    request_bytes = ftell(file);
    rewind(file);
    request = malloc(request_bytes);
    if (!request || fread(request, 1, request_bytes, file) != request_bytes) exit_with_error("read");
    size_t connection_count = strtoull(argv[5], NULL, 10), time_count = 0;
    struct connection *connections = calloc(connection_count, sizeof *connections);
    if (!connections) exit_with_error("calloc");
    for (size_t i = 0; i < connection_count; i++) connections[i].fd = connect_socket(argv[2]);
    double seconds = atof(argv[4]), opened = read_clock_s(), used = read_processor_seconds();
    counting_start = opened + seconds / 5;
    counting_end = opened + seconds;
    for (size_t i = 0; i < connection_count; i++)
        if (pthread_create(&connections[i].thread, NULL, run_connection, &connections[i]))
            exit_with_error("pthread_create");
    double counted_responses = 0;
    for (size_t i = 0; i < connection_count; i++) {
        struct connection *connection = &connections[i];
        pthread_join(connection->thread, NULL);
        time_count += connection->time_count;
        counted_responses += connection->counted_responses;
    }
    double busy = (read_processor_seconds() - used) / (read_clock_s() - opened);
    double *times = malloc((time_count + 1) * sizeof *times);
    if (!time_count || !times) return 1;
    for (size_t i = 0, filled = 0; i < connection_count; i++) {
        const struct connection *connection = &connections[i];
        if (connection->time_count) memcpy(times + filled, connection->times, connection->time_count * sizeof *times);
        filled += connection->time_count;
    }
    qsort(times, time_count, sizeof *times, compare_ascending);
    printf("%.6f %.9f %.9f %.4f\n", counted_responses / (counting_end - counting_start), times[time_count / 2],
           times[time_count * 99 / 100], busy);
    return 0;
}
