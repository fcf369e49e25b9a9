. /tmp/suite/env.sh
t() { n=$1; shift; /usr/bin/time -f "$n %U user %S sys %e wall" "$@" > /tmp/suite/ab.out 2>/tmp/suite/ab.err; tail -1 /tmp/suite/ab.err; tail -1 /tmp/suite/ab.out | cut -c1-100; }
S="tests/kernels/test_attention_variants.py -n 0"
t base python -m pytest $S
t loc0 env JAX_TRACEBACK_IN_LOCATIONS_LIMIT=0 python -m pytest $S
t base python -m pytest $S
t loc0full env JAX_TRACEBACK_IN_LOCATIONS_LIMIT=0 JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS=0 python -m pytest $S
