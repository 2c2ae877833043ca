"""What the programs share that fork and kill themselves, as text to be put before theirs."""

FORKED = """
import os
import torch
from tensordict import TensorDict
torch.set_num_threads(1)

def forked(function):
    '''The process that calls the function, and dies with status 9 if that raises.'''
    pid = os.fork()
    if pid == 0:
        code = 9
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return pid

def flat(value):
    '''A state as plain values that compare bit for bit.'''
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.shape, value.reshape(-1).view(torch.uint8).tolist())
    if isinstance(value, TensorDict):
        return flat(value.to_dict())
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    return [flat(item) for item in value] if isinstance(value, list) else value
"""
