;; Does what a plugin should.
(module
  ;;! include reward
  (func $odd (param i32))
)
