"""RULER's tasks at each length, under the mesh that trains: see README.md here.

Source: Hsieh et al., RULER: What's the Real Context Size of Your Long-Context Language Models?, 2024,
https://arxiv.org/abs/2404.06654, and github.com/NVIDIA/RULER, whose tasks, arguments and scores these are. The code, the words
of the prompts and all lists are our own.
"""

from ejdist.evaluation.ruler.measure import measure_ruler
from ejdist.evaluation.ruler.questions import Questions
from ejdist.evaluation.ruler.samples import Case, Generator, Sample, Sources, Task
from ejdist.evaluation.ruler.scoring import Scored, string_match, summary
from ejdist.evaluation.ruler.tasks import ALL, TASKS, check_names, chosen
from ejdist.evaluation.ruler.words import Essays

__all__ = [
    "ALL",
    "TASKS",
    "Case",
    "Essays",
    "Generator",
    "Questions",
    "Sample",
    "Scored",
    "Sources",
    "Task",
    "check_names",
    "chosen",
    "measure_ruler",
    "string_match",
    "summary",
]
