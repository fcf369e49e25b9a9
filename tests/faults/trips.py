"""Faults of the hops that the documents of a batch need (ejdist/sequence/way.py, trips.py)."""

from faults import Fault

TRIPS = "tests/test_trips.py"
CONTIGUOUS = f"{TRIPS} -k sent[scheme0"
ZIGZAG = f"{TRIPS} -k sent[scheme1"
GATHERED = f"{TRIPS} -k 'sent and scheme3'"

FAULTS = (
    Fault(
        "a way ends with the last hop but one",
        "Way.of",
        "$last, $none = ($seen[-1], $$rest)",
        "$last, $none = ($seen[-2], $$rest)",
        f"{TRIPS} -k a_way",
    ),
    Fault(
        "a way leaves out a hop that is needed",
        "Way.of",
        "$up = $seen[$start - 1]",
        "$up = $seen[$start - 1] - 1",
        f"{TRIPS} -k a_way",
    ),
    Fault(
        "hops are left out where that sends more",
        "Way.of",
        "$up + 1 + $n - $start < $last",
        "$up + 1 + $n - $start < $last + 2",
        f"{TRIPS} -k a_way",
    ),
    Fault("hops between others are never left out", "trips:jumps", "$local.ranks > 2", "False", ZIGZAG),
    Fault(
        "what leaves out hops comes a hop too far",
        "Way.next",
        "$self.start - $self.up - 1",
        "$self.start - $self.up",
        ZIGZAG,
    ),
    Fault(
        "needed is what is needed of a rank, not at a hop",
        "needed_of",
        "$local.work[$holders]",
        "$local.work",
        CONTIGUOUS,
    ),
    Fault(
        "gradients go home as after all hops",
        "over_needed.around",
        "$n - $hop",
        "1",
        CONTIGUOUS,
    ),
    Fault(
        "what a rank adds for its own keys is lost where others add",
        "over_needed.around",
        "$x.astype(jnp.float32) + $arrived[$name]",
        "$arrived[$name]",
        CONTIGUOUS,
    ),
    Fault(
        "sums stay where they are, and do not follow the keys",
        "over_needed.visit",
        "one_on($keys), one_on($travel)",
        "one_on($keys), $travel",
        ZIGZAG,
    ),
    Fault(
        "of several hops the last is not made",
        "over_needed.rest",
        "body($last, $keys, $stay, one_on($travel), True)",
        "($stay, one_on($travel))",
        ZIGZAG,
    ),
    Fault(
        "gathered keys are those of the hop before",
        "gathered.placed",
        "$local.holder($hop) * $length",
        "$local.holder($hop - 1) * $length",
        GATHERED,
    ),
    Fault(
        "gradients of gathered keys of other ranks are lost",
        "scattered.visit",
        "$x + $sums[$n]",
        "$x",
        GATHERED,
    ),
    Fault(
        "keys are gathered from all where few are needed",
        "gathered",
        "$way.sent < $local.ranks - 1",
        "$way.sent < 0",
        GATHERED,
    ),
    Fault(
        "rows need the last rank only",
        "needed_of_rows",
        "range($n)",
        "range($n - 1, $n)",
        f"{TRIPS} -k pairs",
    ),
    Fault(
        "a plan counts no documents",
        "Share.scheme_traffic",
        "hops_of_documents($$args)",
        "None",
        f"{TRIPS} -k 'share or plan'",
    ),
    Fault(
        "every order makes the hops of documents",
        "by_batch",
        "$hops == AUTO and $few",
        "$hops == AUTO",
        f"{TRIPS} -k plan",
    ),
    Fault(
        "a recipe's hops are not those of its ring",
        "SequenceSection._options",
        "None if self.hops == AUTO else self.hops",
        "None",
        f"{TRIPS} -k recipe",
    ),
    Fault(
        "what a scheme leaves open is not searched",
        "search:_search",
        "attempt(details($$args))",
        "attempt(())",
        "tests/test_planned_savings.py -k groups",
    ),
    Fault(
        "where nothing fits no other scheme is tried",
        "search:_search.first",
        "[$smallest[1]] if $smallest else []",
        "[]",
        "tests/test_planned_savings.py -k groups",
    ),
    Fault(
        "heads are cut into groups where memory is enough",
        "candidates:details",
        "HEAD_GROUPS if $tight and 'head_groups' in $options else ()",
        "HEAD_GROUPS if 'head_groups' in $options else ()",
        "tests/test_declared_costs.py -k leaves_open",
    ),
    Fault(
        "keys that are given are searched",
        "candidates:details",
        "[((), *((($key, $value),) for $value in $values)) for $key, $values in $tried.items() if $key not in $given]",
        "[((), *((($key, $value),) for $value in $values)) for $key, $values in $tried.items()]",
        "tests/test_declared_costs.py -k leaves_open",
    ),
    Fault(
        "keys of a scheme are left out of a plan",
        "Candidate.overrides",
        "$values | {$key: str($value) for $key, $value in self.sequence}",
        "$values",
        "tests/test_declared_costs.py -k leaves_open",
    ),
    Fault(
        "groups that heads do not divide into are tried",
        "candidates:details",
        "_takes($made, $section.named, $heads, $axes)",
        "True",
        "tests/test_declared_costs.py -k leaves_open",
    ),
    Fault(
        "hops: short rows take a loop that costs more than their hops",
        "way:few_hops",
        "$order.few_hops and $tokens >= LONG",
        "$order.few_hops",
        "tests/test_trips.py -k hops_of_long_rows",
    ),
)
