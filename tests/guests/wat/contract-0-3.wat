;; An ordinary plugin for a contract that breaks with ours.
;;! contract 0.3.0
(module
  ;;! include reward
  (func $odd (param i32))
)
