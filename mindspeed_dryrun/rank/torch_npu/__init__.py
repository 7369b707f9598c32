"""What a rank on torch_npu needs inside its process: answers for the stand-in CANN, and life without other ranks."""

ENGINE = "torch_npu"
SNAPSHOT_VARIABLE = "MINDSPEED_DRYRUN_SNAPSHOT"  # names the file for torch_npu's memory history, where it is recorded
TASK_QUEUE_VARIABLE = "MINDSPEED_DRYRUN_TASK_QUEUE"  # the script's own TASK_QUEUE_ENABLE
SNAPSHOT = "memory_snapshot.pickle"
