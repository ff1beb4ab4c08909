;; Has three memories.
(module
  ;;! include reward
  (func $odd (param i32))
  (memory 1)
  (memory 1)
)
