/* A closed-loop client with one connection: sends the same request again and again and reads each answer.
 *
 * usage: client http|raw ADDRESS REQUEST_FILE SECONDS
 *   ADDRESS  a port on 127.0.0.1, or the path of a Unix domain socket
 *   http     the file is a whole HTTP request; answers have a Content-Length and must be 200
 *   raw      the file is sent as it is and as many bytes come back
 * Writes one line: answers, seconds, and the median time of one in seconds.  A fifth of the time is spent before
 * anything is counted.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 256 * 1024, MOST = 1 << 22 };
static char piece[PIECE + 1];
static double times[MOST];

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

static void skip(int fd, size_t left) {
    while (left) {
        ssize_t got = recv(fd, piece, left < PIECE ? left : PIECE, 0);
        if (got <= 0) die("recv");
        left -= got;
    }
}

static void read_answer(int fd) {
    size_t held = 0;
    char *end = NULL;
    while (!end) {
        ssize_t got = recv(fd, piece + held, PIECE - held, 0);
        if (got <= 0) die("recv");
        held += got;
        piece[held] = 0;
        end = strstr(piece, "\r\n\r\n");
    }
    if (strncmp(piece, "HTTP/1.1 200", 12)) {
        fprintf(stderr, "%.200s\n", piece);
        exit(1);
    }
    char *length = strcasestr(piece, "\r\ncontent-length:");
    if (!length || length > end) exit(1);
    skip(fd, strtoull(length + 17, NULL, 10) - (held - (end + 4 - piece)));
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    int raw = !strcmp(argv[1], "raw");
    FILE *file = fopen(argv[3], "rb");
    if (!file) die(argv[3]);
    fseek(file, 0, SEEK_END);
    size_t nbytes = ftell(file);
    rewind(file);
    char *request = malloc(nbytes);
    if (!request || fread(request, 1, nbytes, file) != nbytes) die("read");
    int fd = connected(argv[2]);
    double seconds = atof(argv[4]), opened = now(), began = 0, ended = opened;
    size_t count = 0;
    while (ended - opened < seconds && count < MOST) {
        int counted = ended - opened >= seconds / 5;
        double sending = now();
        if (counted && !count) began = sending;
        send_all(fd, request, nbytes);
        if (raw)
            skip(fd, nbytes);
        else
            read_answer(fd);
        ended = now();
        if (counted) times[count++] = ended - sending;
    }
    if (!count) return 1;
    qsort(times, count, sizeof *times, ascending);
    printf("%zu %.9f %.9f\n", count, ended - began, times[count / 2]);
    return 0;
}
