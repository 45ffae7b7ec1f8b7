/* A closed-loop client: on each connection, a thread sends the same request again and again and reads each answer.
 *
 * usage: client http|raw ADDRESS REQUEST_FILE SECONDS CONNECTIONS
 *   ADDRESS  a port on 127.0.0.1, or the path of a Unix domain socket
 *   http     the file is a whole HTTP request; answers have a Content-Length and must be 200
 *   raw      the file is sent as it is and as many bytes come back
 * Writes one line: answers a second, the median and the 99th percentile of one's time in seconds, and how many
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

enum { PIECE = 256 * 1024 };

/* A connection, and what came of it. */
struct line {
    pthread_t thread;
    int fd;
    char piece[PIECE + 1];
    double *times, answered;
    size_t count, room;
};

static int raw;
static char *request;
static size_t request_bytes;
static double begin, end;

static void die(const char *why) {
    perror(why);
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static int connected(const char *address) {
    int fd;
    if (strchr(address, '/')) {
        struct sockaddr_un to = {.sun_family = AF_UNIX};
        strncpy(to.sun_path, address, sizeof to.sun_path - 1);
        fd = socket(AF_UNIX, SOCK_STREAM, 0);
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &(int){1 << 22}, sizeof(int));
        if (connect(fd, (struct sockaddr *)&to, sizeof to)) die("connect");
        return fd;
    }
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(atoi(address))};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&to, sizeof to)) die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    return fd;
}

static void send_all(int fd, const char *data, size_t left) {
    while (left) {
        ssize_t sent = send(fd, data, left, MSG_NOSIGNAL);
        if (sent <= 0) die("send");
        data += sent;
        left -= sent;
    }
}

static void skip(struct line *on, size_t left) {
    while (left) {
        ssize_t got = recv(on->fd, on->piece, left < PIECE ? left : PIECE, 0);
        if (got <= 0) die("recv");
        left -= got;
    }
}

static void read_answer(struct line *on) {
    char *piece = on->piece, *stop = NULL;
    size_t held = 0;
    while (!stop) {
        ssize_t got = recv(on->fd, piece + held, PIECE - held, 0);
        if (got <= 0) die("recv");
        held += got;
        piece[held] = 0;
        stop = strstr(piece, "\r\n\r\n");
    }
    if (strncmp(piece, "HTTP/1.1 200", 12)) {
        fprintf(stderr, "%.200s\n", piece);
        exit(1);
    }
    char *length = strcasestr(piece, "\r\ncontent-length:");
    if (!length || length > stop) exit(1);
    skip(on, strtoull(length + 17, NULL, 10) - (held - (stop + 4 - piece)));
}

static double share_counted(double sent, double answered) {
    double first = sent > begin ? sent : begin, last = answered < end ? answered : end;
    return last > first ? (last - first) / (answered - sent) : 0;
}

static void note(struct line *on, double seconds) {
    if (on->count == on->room) {
        on->room = on->room ? 2 * on->room : 4096;
        on->times = realloc(on->times, on->room * sizeof *on->times);
        if (!on->times) die("realloc");
    }
    on->times[on->count++] = seconds;
}

static void *run(void *line) {
    struct line *on = line;
    for (double sending = now(); sending < end || !on->count;) {
        send_all(on->fd, request, request_bytes);
        if (raw)
            skip(on, request_bytes);
        else
            read_answer(on);
        double answered = now();
        on->answered += share_counted(sending, answered);
        if (sending >= begin) note(on, answered - sending);
        sending = answered;
    }
    return NULL;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double processor_seconds(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    raw = !strcmp(argv[1], "raw");
    FILE *file = fopen(argv[3], "rb");
    if (!file) die(argv[3]);
    fseek(file, 0, SEEK_END);
    request_bytes = ftell(file);
    rewind(file);
    request = malloc(request_bytes);
    if (!request || fread(request, 1, request_bytes, file) != request_bytes) die("read");
    size_t connections = strtoull(argv[5], NULL, 10), count = 0;
    struct line *lines = calloc(connections, sizeof *lines);
    if (!lines) die("calloc");
    for (size_t i = 0; i < connections; i++) lines[i].fd = connected(argv[2]);
    double seconds = atof(argv[4]), opened = now(), used = processor_seconds();
    begin = opened + seconds / 5;
    end = opened + seconds;
    for (size_t i = 0; i < connections; i++)
        if (pthread_create(&lines[i].thread, NULL, run, &lines[i])) die("pthread_create");
    double answered = 0;
    for (size_t i = 0; i < connections; i++) {
        struct line *on = &lines[i];
        pthread_join(on->thread, NULL);
        count += on->count;
        answered += on->answered;
    }
    double busy = (processor_seconds() - used) / (now() - opened);
    double *times = malloc((count + 1) * sizeof *times);
    if (!count || !times) return 1;
    for (size_t i = 0, filled = 0; i < connections; filled += lines[i].count, i++)
        if (lines[i].count) memcpy(times + filled, lines[i].times, lines[i].count * sizeof *times);
    qsort(times, count, sizeof *times, ascending);
    printf("%.6f %.9f %.9f %.4f\n", answered / (end - begin), times[count / 2], times[count * 99 / 100], busy);
    return 0;
}
