;; A valid plugin for an incompatible later contract.
;;! contract 0.3.0
(module
  ;;! include reward
  (func $odd (param i32))
)
