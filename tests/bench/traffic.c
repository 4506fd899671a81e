/*
 * traffic: what the network benchmark moves, at both ends.
 *
 *   traffic serve PORT                     answers the others, each connection in a process of its own
 *   traffic down|up ADDRESS PORT MIB       moves so much in one connection
 *   traffic connect ADDRESS PORT COUNT     connects so often, one after the other
 *   traffic hold ADDRESS PORT COUNT KIB    opens so many connections, then moves so much each way in each of them
 *
 * Each measurement is two lines: "begin WHAT", and "end WHAT MICROSECONDS" (a connect's median). "opened" and "moved" stand
 * for a second, in which somebody may look at how things are.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* The filter lets 20 new connections through a second. */
enum { CHUNK = 1 << 20, MOST = 1024, PAUSE_US = 60000 };

static char chunk[CHUNK];

static long long now_us(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void write_all(int fd, uint64_t left)
{
	while (left > 0) {
		ssize_t n = write(fd, chunk, left < CHUNK ? left : CHUNK);
		if (n <= 0)
			die("write");
		left -= n;
	}
}

static void read_all(int fd, uint64_t left)
{
	while (left > 0) {
		ssize_t n = read(fd, chunk, left < CHUNK ? left : CHUNK);
		if (n <= 0)
			die("read");
		left -= n;
	}
}

/* A request: how much the server is to send, and how much it is sent. It says so when it has it. */
static void ask(int fd, uint64_t down, uint64_t up)
{
	uint64_t request[2] = { down, up };

	if (write(fd, request, sizeof request) != sizeof request)
		die("request");
}

static void answer(int fd)
{
	uint64_t request[2];

	while (recv(fd, request, sizeof request, MSG_WAITALL) == sizeof request) {
		write_all(fd, request[0]);
		read_all(fd, request[1]);
		write_all(fd, 1);
	}
	exit(0);
}

static void serve(int port)
{
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };

	signal(SIGCHLD, SIG_IGN);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (bind(listener, (void *)&address, sizeof address) != 0 || listen(listener, 512) != 0)
		die("listen");
	for (;;) {
		int fd = accept(listener, NULL, NULL);
		if (fd < 0)
			continue;
		if (fork() == 0) {
			close(listener);
			answer(fd);
		}
		close(fd);
	}
}

static int dial(char **argv)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(atoi(argv[3])) };

	inet_pton(AF_INET, argv[2], &address.sin_addr);
	if (connect(fd, (void *)&address, sizeof address) != 0)
		die("connect");
	return fd;
}

static int by_size(const void *a, const void *b)
{
	long long x = *(const long long *)a, y = *(const long long *)b;

	return (x > y) - (x < y);
}

static void connects(char **argv, int count)
{
	static long long took[MOST];

	for (int i = 0; i < count; i++) {
		long long start = now_us();
		int fd = dial(argv);
		took[i] = now_us() - start;
		close(fd);
		usleep(PAUSE_US);
	}
	qsort(took, count, sizeof *took, by_size);
	printf("end connect %lld\n", took[count / 2]);
}

static void hold(char **argv, int count, uint64_t bytes)
{
	static int fds[MOST];

	for (int i = 0; i < count; i++) {
		fds[i] = dial(argv);
		usleep(PAUSE_US);
	}
	puts("opened");
	sleep(1);
	for (int i = 0; i < count; i++) {
		ask(fds[i], bytes, bytes);
		read_all(fds[i], bytes);
		write_all(fds[i], bytes);
		read_all(fds[i], 1);
	}
	puts("moved");
	sleep(1);
	puts("end hold 0");
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	int count = argc > 4 ? atoi(argv[4]) : 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (strcmp(what, "serve") == 0 && argc == 3)
		serve(atoi(argv[2]));
	if (argc < 5 || count < 1 || count > MOST)
		return 2;
	printf("begin %s\n", what);
	if (strcmp(what, "connect") == 0) {
		connects(argv, count);
	} else if (strcmp(what, "hold") == 0 && argc == 6) {
		hold(argv, count, atoll(argv[5]) << 10);
	} else {
		uint64_t bytes = (uint64_t)count << 20;
		int down = strcmp(what, "down") == 0, fd = dial(argv);
		long long start = now_us();

		ask(fd, down ? bytes : 0, down ? 0 : bytes);
		if (down)
			read_all(fd, bytes);
		else
			write_all(fd, bytes);
		read_all(fd, 1);
		printf("end %s %lld\n", what, now_us() - start);
	}
	return 0;
}
