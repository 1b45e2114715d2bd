"""The problem types of the observer's API. Details name the mistake and never repeat the client's input."""

from services.core.http.problem_type import ProblemType

BAD_PARAMETER = ProblemType("bad-parameter", 400, "A parameter is not understood")
NOT_FOUND = ProblemType("not-found", 404, "There is no such resource")
DESTINATION_NOT_FOUND = ProblemType("destination-not-found", 404, "The pipe file has no such destination")
METHOD_NOT_ALLOWED = ProblemType("method-not-allowed", 405, "This method is not allowed here")
BAD_REQUEST = ProblemType("bad-request", 400, "The HTTP request is malformed")
BAD_HOST = ProblemType("bad-host", 421, "The observer has another name")
UNAUTHORIZED = ProblemType("unauthorized", 401, "A token is needed")
INTERNAL = ProblemType("internal", 500, "The observer failed")
PIPE_NOT_FOUND = ProblemType("pipe-not-found", 404, "The pipe file has no such pipe")
BAD_BODY = ProblemType("bad-body", 400, "The body is not understood")
BUSY = ProblemType("busy", 429, "One such request at a time is answered")
TOO_MANY_WINDOWS = ProblemType("too-many-windows", 409, "Too many planned actions are announced")
BROKER_AWAY = ProblemType("broker-away", 503, "The broker cannot be reached")
NOT_JSON = ProblemType("not-json", 415, "The body must be JSON")
STANDS_BY = ProblemType("stands-by", 503, "This observer stands by for another one")
PLANNED_NOT_FOUND = ProblemType("planned-not-found", 404, "There is no such planned action")
