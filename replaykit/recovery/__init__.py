"""Keep state on disk that is valid at every instant, even if a process is killed.

- ``journal``: mapped files that grow, a journal of old rows, and states that change atomically.
- ``recovery_folder``: the manifest, and the folder that holds all these files.
- ``locks``: locks of folders and files between processes and their forked children, and records of
  the processes that use a folder, of their views and of their changes.
"""
