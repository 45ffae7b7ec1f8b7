/* The ceiling of one connection: receives a message whole and sends it back whole, with blocking calls.
 *
 * usage: echo NBYTES
 * Writes the port that it listens on and serves one connection after another.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

/* Returns 0 if the connection ended before all bytes came. */
static int receive_all(int fd, char *data, size_t left) {
    while (left) {
        ssize_t got = recv(fd, data, left, 0);
        if (got <= 0) return 0;
        data += got;
        left -= got;
    }
    return 1;
}

/* Returns 0 if the connection ended before all bytes were sent. */
static int send_all(int fd, const char *data, size_t left) {
    while (left) {
        ssize_t sent = send(fd, data, left, MSG_NOSIGNAL);
        if (sent <= 0) return 0;
        data += sent;
        left -= sent;
    }
    return 1;
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    size_t nbytes = strtoull(argv[1], NULL, 10);
    char *message = malloc(nbytes);
    struct sockaddr_in at = {.sin_family = AF_INET};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&at, length) || listen(listener, 4)) return 1;
    getsockname(listener, (struct sockaddr *)&at, &length);
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
        while (receive_all(fd, message, nbytes) && send_all(fd, message, nbytes)) {
        }
        close(fd);
    }
}
