"""A run that is given secrets in nine ways, all of them canaries."""

from pathlib import Path

SETTINGS = """
model_name_or_path: student
teacher: server
teacher_server_model: teacher
teacher_server_base_url: {url}
teacher_server_protocol: vllm
teacher_server_top_k: 8
teacher_server_retries: 0
teacher_server_api_key_env: MY_SERVER
dataset_name: rows.jsonl
output_dir: out
run_name: run of canary-by-value
max_steps: 2
save_steps: 1
per_device_train_batch_size: 4
logging_steps: 1
gradient_checkpointing: false
max_length: 32
holdout_fraction: 0.2
num_sample_completions: 1
max_new_tokens: 2
use_cpu: true
report_to: tensorboard
hub_token: canary-hub-token
model_init_kwargs: '{{"token": "canary-of-model"}}'
env:
  COMET_AUTH: Bearer canary-by-env
  MLFLOW_TRACKING_URI: https://me:canary-in-env-url@db/x
"""
ENVIRONMENT = {
    "HF_TOKEN": "canary-of-environment",
    "MY_SERVER": "canary-of-server",
    "OTHER_PASSWORD": "canary-by-value",
    "QUEUE": "amqp://me:canary-in-url-of-environment@queue",
}
# stands in for a tracker that is installed: what transformers hands to TensorBoard goes into a file
TENSORBOARD = """
import sys
class SummaryWriter:
    def __init__(self, log_dir=None):
        self.file = open("tracked.txt", "a")
        print(sys.argv, file=self.file)
    def add_scalar(self, name, value, step):
        print(f"scalar {name} {step} {float(value)}", file=self.file, flush=True)
    def add_text(self, name, text):
        print(name, text, file=self.file, flush=True)
    def __getattr__(self, name):
        return lambda *args, **kwargs: print(name, args, kwargs, file=self.file, flush=True)
"""


def holding(folder: Path, secret: bytes = b"canary") -> list[str]:
    """Return the files in a folder that hold a secret, except the configuration that gave it."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "run.yaml"]
    return [str(file.relative_to(folder)) for file in files if secret in file.read_bytes()]
