"""A worker's program that does what its standard input says, in Python."""

import atexit
import os
import random
import signal
import sys

WORDS = {"atexit": atexit, "os": os, "random": random, "signal": signal, "sys": sys}


def main():
    for line in sys.stdin:
        exec(line, WORDS)


if __name__ == "__main__":
    main()
