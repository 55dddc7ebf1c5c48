"""What a run is judged by. Values of single examples are summed over the mesh with the padding masked (`objective`).

What no sum can say has a form that merges instead: `ranking` (area under the ROC curve), `bleu`, `coco`; `hosts`
brings the parts together. Importing this does not import JAX.
"""

from multipod.metrics.ranking import auc

__all__ = ["auc"]
