"""A W&B server on loopback that answers just what the pinned wandb asks for, and keeps what it is sent."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "a" * 40


class WandbServer:
    """In a with statement. `runs`: id -> {"config", "group", "lines": {file: {offset: line}}, "exit_code", "files"}.

    answer_after_s: a wait before each answer. status: of each answer, 401 is a key that is not accepted.
    """

    def __init__(self, answer_after_s=0.0, status=200):
        self.answer_after_s, self.status = answer_after_s, status
        self.runs, self.inits, self.unknown = {}, 0, []
        handler = type("BoundHandler", (Handler,), {"server_state": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.env = {"WANDB_MODE": None, "WANDB_BASE_URL": self.url, "WANDB_API_KEY": KEY, "WANDB_ERROR_REPORTING": "false",
                    "NO_PROXY": "127.0.0.1"}

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.http.shutdown()
        self.http.server_close()

    def rows(self, run):
        """The history of a run, in order."""
        return [json.loads(line) for _, line in sorted(self.runs[run]["lines"].get("wandb-history.jsonl", {}).items())]

    def config(self, run):
        return {key: item["value"] for key, item in json.loads(self.runs[run]["config"]).items() if key != "_wandb"}

    # -- GraphQL, by the name of the operation

    def Viewer(self, variables):
        return {"viewer": {"id": "V", "entity": "me", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}}

    def OrganizationCoreWeaveOrganizationID(self, variables):
        return {"entity": {"organization": {"coreWeaveOrganizationId": None}}}

    def RunResumeStatus(self, variables):
        self.inits += 1
        run = self.runs.get(variables["name"])
        bucket = run and {
            "id": "R", "name": variables["name"], "displayName": run["name"], "summaryMetrics": run["summary"] or "{}",
            "config": run["config"], "tags": [], "notes": "", "logLineCount": 0,
            "wandbConfig": json.dumps({"t": json.loads(run["config"]).get("_wandb", {}).get("value", {}).get("t")}),
            "historyLineCount": len(run["lines"].get("wandb-history.jsonl", {})),
            "eventsLineCount": len(run["lines"].get("wandb-events.jsonl", {})),
            "historyTail": self.tail(run, "wandb-history.jsonl"), "eventsTail": self.tail(run, "wandb-events.jsonl")}
        return {"model": {"id": "P", "name": variables["project"], "entity": {"id": "E", "name": "me"}, "bucket": bucket}}

    def UpsertBucket(self, variables):
        name = variables["name"]
        is_new = name not in self.runs
        run = self.runs.setdefault(name, {"config": "{}", "group": None, "name": None, "summary": None, "lines": {},
                                          "exit_code": None, "files": {}})
        for field, key in (("config", "config"), ("groupName", "group"), ("displayName", "name"),
                           ("summaryMetrics", "summary")):
            run[key] = variables.get(field) or run[key]
        project = {"id": "P", "name": variables["project"], "entity": {"id": "E", "name": "me"}}
        return {"upsertBucket": {"inserted": is_new, "bucket": {
            "id": "R", "name": name, "displayName": run["name"], "description": "", "config": run["config"],
            "sweepName": None, "project": project, "historyLineCount": len(run["lines"].get("wandb-history.jsonl", {}))}}}

    def CreateRunFiles(self, variables):
        files = [{"name": file, "uploadUrl": f"{self.url}/upload/{variables['run']}/{file}"} for file in variables["files"]]
        return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": files}}

    @staticmethod
    def tail(run, file):
        """The last line of a file, in a JSON list in a string."""
        lines = run["lines"].get(file, {})
        return json.dumps([lines[max(lines)]] if lines else [])

    # -- everything else

    def file_stream(self, run, sent):
        for file, part in sent.get("files", {}).items():
            kept = self.runs[run]["lines"].setdefault(file, {})
            kept.update({part.get("offset", 0) + index: line for index, line in enumerate(part["content"])})
        if sent.get("complete"):
            self.runs[run]["exit_code"] = sent.get("exitcode")
        return {}

    def answer(self, method, path, body):
        time.sleep(self.answer_after_s)
        parts = path.strip("/").split("/")
        if path == "/graphql":
            asked = json.loads(body)
            operation = getattr(self, asked.get("operationName") or "", None)
            if operation is not None:
                return {"data": operation(asked.get("variables") or {})}
        elif parts[-1] == "file_stream":
            return self.file_stream(parts[-2], json.loads(body))
        elif parts[0] == "upload":
            self.runs[parts[1]]["files"]["/".join(parts[2:])] = body
            return {}
        elif "otel" in parts:  # wandb's figures about itself
            return {}
        self.unknown.append((method, path, body[:200]))
        return {"errors": [{"message": "this server does not know that"}]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = json.dumps(self.server_state.answer(self.command, self.path, body)).encode()
        try:
            self.send_response(self.server_state.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
        except OSError:  # the client has not waited
            pass

    do_GET = do_PUT = do_POST

    def log_message(self, *arguments):
        pass
