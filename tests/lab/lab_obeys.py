"""A worker program that executes Python code from standard input."""

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
