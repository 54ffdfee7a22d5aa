"""Puts and leases per second of TransferQueue; started by benchmarks/store.py.

python benchmarks/peers/transferqueue.py PROMPT RESPONSE ROUNDS BATCH ...
"""

import json
import sys
import time

import ray
import torch
import transfer_queue
from tensordict import TensorDict

FIELDS = ["tokens", "action_mask", "logprobs", "versions", "reward"]


def batch_of(rows: int, prompt: int, response: int) -> TensorDict:
    """What an experience of ours holds, as tensors."""
    columns = {
        "tokens": torch.randint(0, 50_000, (rows, prompt + response), dtype=torch.int32),
        "action_mask": torch.ones(rows, response, dtype=torch.bool),
        "logprobs": torch.randn(rows, response),
        "versions": torch.zeros(rows, response, dtype=torch.int32),
        "reward": torch.rand(rows, 1),
    }
    return TensorDict(columns, batch_size=rows)


def rates(client, rows: int, prompt: int, response: int, rounds: int) -> tuple[float, float]:
    batches = [batch_of(rows, prompt, response) for _ in range(rounds + 1)]
    partition = f"batches of {rows}"

    def lease() -> None:
        meta = client.get_meta(data_fields=FIELDS, batch_size=rows, partition_id=partition, task_name="train")
        assert len(client.get_data(meta)["tokens"]) == rows

    client.put(data=batches[0], partition_id=partition)
    lease()
    began = time.perf_counter()
    for batch in batches[1:]:
        client.put(data=batch, partition_id=partition)
    put = time.perf_counter()
    for _ in range(rounds):
        lease()
    return rounds / (put - began), rounds / (time.perf_counter() - put)


def main() -> None:
    prompt, response, rounds, *sizes = map(int, sys.argv[1:])
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=16)  # its actors ask for many
    transfer_queue.init()
    client = transfer_queue.get_client()
    rates_by_rows = {rows: rates(client, rows, prompt, response, rounds) for rows in sizes}
    transfer_queue.close()
    ray.shutdown()
    print(json.dumps(rates_by_rows))


if __name__ == "__main__":
    main()
