from jedbatch import policies
from jedbatch._batch import Batched, Plan, batch
from jedbatch._graph import Graph
from jedbatch._schedule import Schedule, lower_bound, schedule
from jedbatch._trace import cell
