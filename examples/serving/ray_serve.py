"""A batched function behind Ray Serve, in as many processes as the load needs, on any machines.

    pip install "ray[serve]" && cd examples/serving && serve run ray_serve:encoder
    curl -d '[[1, 2], 3]' http://127.0.0.1:8000/

Ray starts processes, chooses one for each request, and ends those that do not answer. In each a
`jedbatch.serve.Server` runs requests many at a time, so Ray's own batching is not used.
"""

from ray import serve
from starlette.responses import JSONResponse

# --- the replicas ---


@serve.deployment(
    max_ongoing_requests=256,  # that a process computes or has wait
    autoscaling_config={"min_replicas": 2, "max_replicas": 16, "target_ongoing_requests": 64},
    graceful_shutdown_timeout_s=30,
)
class Encoder:
    """A process of several; it gets requests once `__init__` is done."""

    async def __init__(self):
        import model  # here, since Ray sends this class to other processes

        from jedbatch.serve import Server

        self.decode = model.checked
        server = Server(model.encode_all, model.params, max_batch=64)
        self.server = await server.__aenter__()
        await self.server.warm(model.instances)

    async def __call__(self, request):
        try:
            tree = self.decode(await request.json())
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 422)
        return (await self.server(tree)).tolist()

    def check_health(self):
        if not self.server.is_serving:
            raise RuntimeError("the server is closed")

    async def __del__(self):  # called when all requests are answered
        await self.server.close()


encoder = Encoder.bind()
