"""What the programs share that fork and kill themselves, as text to be put before theirs."""

FORKED = """
import os

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
"""
