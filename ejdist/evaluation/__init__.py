"""What a trained model can do at each length: its loss by position, and what it recalls from its context.

Everything runs as training does: on the same mesh, in the same order of the sequence, with the same ring and kernels.
"""

from ejdist.evaluation.recall import TASKS, Cell, Prompts, measure_recall
from ejdist.training.forward import Evaluator
from ejdist.training.positions import Octaves, batches_once, loss_by_octave

__all__ = ["TASKS", "Cell", "Evaluator", "Octaves", "Prompts", "batches_once", "loss_by_octave", "measure_recall"]
