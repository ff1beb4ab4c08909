;; A valid plugin.
(module
  ;;! include reward
  (func $odd (param i32))
)
