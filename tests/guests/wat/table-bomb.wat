;; Grows tables endlessly.
(module
  ;;! include reward

  (table $functions 1 funcref)
  (func $odd (param i32)
    (loop $again
      (drop (table.grow $functions (ref.null func) (i32.const 10000)))
      (br $again)))
)
