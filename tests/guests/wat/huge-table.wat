;; Declares a table of 100 million elements.
(module
  ;;! include reward
  (func $odd (param i32))
  (table 100000000 funcref)
)
