from jedbatch import errors, policies
from jedbatch._batch import Batched, Plan, batch
from jedbatch._cell import cell
from jedbatch._graph import Graph
from jedbatch._schedule import Schedule, lower_bound, schedule
from jedbatch._trace import evaluate
