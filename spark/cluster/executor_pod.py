"""`python -m spark.cluster.executor_pod executor`: an executor in a pod, from the same image as the services.

Spark's Kubernetes scheduler creates the pods of executors. It passes what an executor must know in variables, and expects that
the image's own script makes a command of them. This module is that script for Penstock's image. The pod template that
`write_template` writes names it, and the restrictions of our other pods.
"""

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pyspark

from services.core.jvm.java import java_env

_BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
_ARGUMENTS = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}
_OPTION = re.compile(r"SPARK_JAVA_OPT_(\d+)")
_USER = 10001
"""Of the image."""


def executor_command(java: Path, environ: Mapping[str, str]) -> list[str]:
    """Raises KeyError for a variable that Spark did not set."""
    numbered = {int(found[1]): value for name, value in environ.items() if (found := _OPTION.fullmatch(name))}
    memory = environ["SPARK_EXECUTOR_MEMORY"]
    jars = f"{Path(pyspark.__file__).parent / 'jars'}/*"
    folders = [
        environ.get("SPARK_CONF_DIR"),
        environ.get("SPARK_CLASSPATH"),
        jars,
        environ.get("SPARK_EXTRA_CLASSPATH"),
    ]
    command = [str(java), *(numbered[number] for number in sorted(numbered)), f"-Xms{memory}", f"-Xmx{memory}"]
    command += ["-cp", ":".join(filter(None, folders)), _BACKEND]
    return [*command, *(part for name, variable in _ARGUMENTS.items() for part in (name, environ[variable]))]


def write_template(path: Path) -> None:
    """Write the pod template of executors, as JSON, which is YAML."""
    container = {
        "name": "executor",
        "command": ["python", "-m", "spark.cluster.executor_pod"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    user = {"runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER}
    spec = {
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": {**user, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    labels = {
        "app.kubernetes.io/name": "executor"
    }  # not part-of: that label makes the autoscaler ask a management port
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": labels}, "spec": spec}
    path.write_text(json.dumps(pod), encoding="utf-8")


def main() -> None:
    """Become the executor. Exit status 2 when this is no pod of Spark's."""
    environ = java_env()
    environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    try:
        command = executor_command(Path(environ["JAVA_HOME"]) / "bin" / "java", environ)
    except KeyError as error:
        print(f"{error} is not set. Try: nothing by hand, Spark's scheduler starts executors", file=sys.stderr)
        raise SystemExit(2) from None
    os.execve(command[0], command, environ)  # noqa: S606  Java itself, so that it gets the signals of the pod


if __name__ == "__main__":
    main()
