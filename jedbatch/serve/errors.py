"""Why a request has no result although nothing is wrong with it."""


class Overloaded(RuntimeError):
    """A request was refused, since as many as may wait are waiting; see `Server(max_queue=)`."""


class DeadlineExceeded(TimeoutError):
    """A request was not done in the time that it was given; what was computed of it is dropped."""


class ServerClosed(RuntimeError):
    """A request came to a server that is closed, or was waiting when it was closed."""


class WrongNumberError(TypeError):
    """A request has another number of mapped arguments than the function takes."""
