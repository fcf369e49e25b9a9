import sys

from benchmarks.sequence import main

if __name__ == "__main__":
    main(sys.argv[1:])
